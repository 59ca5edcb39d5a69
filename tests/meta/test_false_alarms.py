"""What looks odd and is right: no check of correctness may fail any of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from specverify.drafting import DraftModel, NoDraft, PromptLookup, ScriptedDrafts
from specverify.engines.reference import ReferenceEngine
from specverify.faults.draft import Proposing
from specverify.kill_matrix import CORRECTNESS, SMALL_PLAN, measured, small_subject
from specverify.models.hashed import VOCAB_SIZE, HashedModel
from specverify.records import Verdict
from specverify.verification import Proposal
from specverify.verification.chain import sample_and_match

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.decoding import Decoder
    from specverify.plan import Plan
    from specverify.subject import Subject

EOS = VOCAB_SIZE - 1
TIES = "ties, and near ties that the shape of a batch decides"
PLAN = replace(SMALL_PLAN, lossless_tokens=2_000, parameter_tokens=160)
HEALTHY = small_subject()


@dataclass(frozen=True, eq=False)
class Changed(HashedModel):
    """A hashed model whose logits are changed."""

    change: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def row(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """Changed logits after the prefix."""
        return self.change(super().row(prefix))


def with_models(target: HashedModel, draft: HashedModel) -> Subject:
    """Chain rejection, drafts drawn from the draft's own law."""
    return with_decoder(replace(HEALTHY.decoder, target=target, drafter=DraftModel(draft, VOCAB_SIZE)), draft=draft)


def with_decoder(decoder: Decoder, draft: HashedModel | None = HEALTHY.draft) -> Subject:
    """The healthy prompts, another decoder."""
    return replace(
        HEALTHY,
        decoder=decoder,
        engine=ReferenceEngine(decoder),
        target=decoder.target,
        draft=draft,
        rule="match" if decoder.rule is sample_and_match else "chain",
        drafts_follow_law=not isinstance(decoder.drafter, ScriptedDrafts),
    )


def sampled_point_masses(inner, context, max_tokens):
    """Drafts that were sampled and are reported as if they had been chosen."""
    sampled = inner.propose(context, max_tokens)
    return Proposal.point_masses(sampled.token_ids, sampled.num_draft_tokens, VOCAB_SIZE)


def first_choice(tokens, step):
    """Three drafts, each the draft's first choice."""
    del step
    ids = list(tokens)
    for _ in range(3):
        ids.append(int(HEALTHY.draft.row(tuple(ids)).argmax()))
    return ids[len(tokens) :]


def tied(logits):
    """Steps of half a logit: every other position is an exact tie."""
    return (2 * logits).round() / 2


def half_the_vocabulary(logits):
    """No probability on the second half."""
    return logits.masked_fill(torch.arange(VOCAB_SIZE) >= VOCAB_SIZE // 2, -torch.inf)


def often_at_an_end(logits):
    """The EOS is the likeliest token nearly everywhere."""
    return logits + 3 * torch.nn.functional.one_hot(torch.tensor(EOS), VOCAB_SIZE)


CASES: dict[str, tuple[Subject, Plan]] = {
    "deterministic drafts, q = 1": (
        with_models(HEALTHY.target, Changed("draft", seed=1, near=HEALTHY.target, change=lambda row: 1e4 * row)),
        PLAN,
    ),
    "deterministic drafts beside the softmax that they come from": (
        with_decoder(replace(HEALTHY.decoder, drafter=ScriptedDrafts(first_choice, VOCAB_SIZE))),
        PLAN,
    ),
    "sampled drafts by sample-and-match": (with_decoder(replace(HEALTHY.decoder, rule=sample_and_match)), PLAN),
    "sampled drafts as point masses by sample-and-match": (
        with_decoder(
            replace(
                HEALTHY.decoder,
                rule=sample_and_match,
                drafter=Proposing(HEALTHY.decoder.drafter, sampled_point_masses),
            )
        ),
        PLAN,
    ),
    "prompt lookup": (with_decoder(replace(HEALTHY.decoder, drafter=PromptLookup(VOCAB_SIZE)), draft=None), PLAN),
    TIES: (
        with_models(Changed(rounding=1e-3, change=tied), Changed("draft", rounding=1e-3, change=tied)),
        PLAN,
    ),
    "p = q": (with_models(HEALTHY.target, HEALTHY.target), PLAN),
    "draft opposed to the target": (
        with_models(HEALTHY.target, Changed("draft", near=HEALTHY.target, disturbed_by=0.0, change=torch.neg)),
        PLAN,
    ),
    "draft of half the vocabulary": (
        with_models(HEALTHY.target, Changed("draft", seed=1, near=HEALTHY.target, change=half_the_vocabulary)),
        PLAN,
    ),
    "target that ends after a token or two": (
        with_models(Changed(change=often_at_an_end), Changed("draft", seed=1, change=often_at_an_end)),
        PLAN,
    ),
    "one token a text": (HEALTHY, replace(PLAN, max_new_tokens=1, lossless_tokens=1_000)),
    "nothing drafted": (with_decoder(replace(HEALTHY.decoder, drafter=NoDraft(VOCAB_SIZE))), PLAN),
}


PARAMETERS = tuple(check for check in CORRECTNESS if check.id == "parameters")


@pytest.mark.parametrize("name", CASES)
def test_no_check_fails_what_is_right(name):
    """INCONCLUSIVE is allowed: an odd pair may leave a check without anything to see."""
    subject, plan = CASES[name]
    for result in measured(None, CORRECTNESS, subject, plan):
        assert result.verdict is not Verdict.FAIL, f"{result.id}: {result.summary}"


@pytest.mark.parametrize("seed", range(17, 20))
def test_a_near_tie_at_the_border_of_top_p_is_no_fault(seed):
    """A token at the very border is inside in one shape of batch, outside in another: that is noise, and counted as such."""
    subject, plan = CASES[TIES]
    (result,) = measured(None, PARAMETERS, subject, replace(plan, parameter_tokens=320, seed=seed))
    assert result.verdict is not Verdict.FAIL, result.summary
    assert any("lie at the edge of the support" in finding.text for finding in result.findings)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_no_check_fails_what_is_right_with_more_samples(name, seed):
    """Three times the tokens, other seeds."""
    subject, plan = CASES[name]
    plan = replace(plan, seed=2_000 + seed, lossless_tokens=3 * plan.lossless_tokens)
    for result in measured(None, CORRECTNESS, subject, plan):
        assert result.verdict is not Verdict.FAIL, f"{result.id}: {result.summary}"
