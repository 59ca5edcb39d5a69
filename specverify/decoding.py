"""The reference decoder: target-only and speculative decoding, batched and ragged, on any device.

The algorithm is `speculative`, read top to bottom. Everything that a fault may change (rule, drafter, law, stop, the
target's session) is a field of `Decoder`, so that a planted fault changes one thing and the loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specverify.choices import Choices, Stream
from specverify.context import Context, Row
from specverify.drafting import Drafter, open_shared, pick
from specverify.errors import InternalError
from specverify.records import DecodeStep, DecodeTrace, FinishReason
from specverify.sampling import probabilities
from specverify.tree import ancestors, depths, paths
from specverify.verification import Proposal, Rule, Verification
from specverify.verification.chain import chain_rejection
from specverify.verification.rules import Drafts

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.models import LanguageModel, Session

__all__ = ["Decoder", "Law", "Stop", "autoregressive", "first_stop", "speculative"]

Law = Callable[..., "Float[Tensor, 'batch n vocab']"]
"""`sampling.probabilities`, or a faulty one."""

Stop = Callable[[Context, "Int[Tensor, 'batch n']", "Int[Tensor, ' batch']"], "list[tuple[int, FinishReason | None]]"]
"""How many of the tokens that a step would emit are emitted, and whether that ends the row."""


def first_stop(
    context: Context, emitted: Int[Tensor, "batch n"], num_emitted: Int[Tensor, " batch"]
) -> list[tuple[int, FinishReason | None]]:
    """Cut each row after the first EOS, stop id or completed stop string, and at its length limit; in that order."""
    cuts: list[tuple[int, FinishReason | None]] = []
    room = (context.limits - context.lengths).tolist()
    rows = zip(context.rows, emitted.tolist(), num_emitted.tolist(), room, strict=True)
    for index, (row, ids, count, most) in enumerate(rows):
        params = row.request.params
        finish: FinishReason | None = FinishReason.LENGTH if count >= most else None
        kept = min(count, most)
        for place, token in enumerate(ids[:kept]):
            if token in params.eos_token_ids:
                kept, finish = place + 1, FinishReason.EOS
                break
            if token in params.stop_token_ids or (
                params.stop_strings and context.completes_stop_string(index, ids[: place + 1])
            ):
                kept, finish = place + 1, FinishReason.STOP
                break
        cuts.append((kept, finish))
    return cuts


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a decode."""

    target: LanguageModel
    drafter: Drafter
    rule: Rule = chain_rejection
    num_speculative_tokens: int = 3
    """Most tokens drafted one after the other: the length of a chain, the depth of a tree."""
    drafts: Drafts = Drafts.CHAIN
    """How the rule wants its drafts drawn. Where that is `COUPLED`, `autoregressive` runs the rule's own race, so that
    both say the same."""
    max_nodes: int = 0
    """Most nodes of one proposal; at least those of a drafter that states its `num_nodes`."""
    law: Law = probabilities
    stop: Stop = first_stop
    detokenize: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)
    """Needed for stop strings only."""
    choices: Callable[[Sequence[Row]], Choices] | None = None
    """Other randomness than `Philox` of each request's seed: to enumerate, or to script."""

    def __post_init__(self) -> None:
        """A drafter that is wrapped later (to plant a fault, to count) no longer states its nodes; they stay known here."""
        object.__setattr__(self, "max_nodes", max(self.max_nodes, getattr(self.drafter, "num_nodes", 0)))

    def start(self, rows: Sequence[Row]) -> Context:
        """The context of a batch in which nothing was said yet."""
        return Context.start(
            rows,
            self.target.device,
            choices=self.choices,
            window=max(self.num_speculative_tokens, self.max_nodes) + 1,
            detokenize=self.detokenize,
        )


@torch.inference_mode()
def speculative(decoder: Decoder, rows: Sequence[Row]) -> Iterator[DecodeTrace]:
    """Draft, verify, emit, roll back, until every row has ended [Leviathan2023, Alg. 1]; traces as rows end."""
    context = decoder.start(rows)
    session = open_shared(decoder.target, context)
    drafting = decoder.drafter(context)
    while context.rows:
        room = context.limits - context.lengths - 1  # a last token needs no draft
        proposal = drafting.propose(context, room.clamp(max=decoder.num_speculative_tokens))
        target_probs = _laws_after_drafts(decoder, session, context, proposal)
        verification = decoder.rule(proposal, target_probs, context.choices)
        emitted, num_emitted = _emitted(proposal, verification)
        cuts = decoder.stop(context, emitted, num_emitted)
        keep = yield from context.commit(emitted, cuts, _steps(proposal, verification, cuts))
        _forget_rejected(session, context, proposal, verification)
        session.select(keep)
        drafting.select(keep)
        context.select(keep)


@torch.inference_mode()
def autoregressive(decoder: Decoder, rows: Sequence[Row]) -> Iterator[DecodeTrace]:
    """The target alone, one token a pass: what speculation must not change."""
    context = decoder.start(rows)
    session = open_shared(decoder.target, context)
    nothing = Proposal.point_masses(context.token_ids[:, :0], torch.zeros_like(context.lengths), 1)
    here = torch.zeros(1, dtype=torch.int64, device=context.token_ids.device)
    while context.rows:
        probs = _laws_after_drafts(decoder, session, context, nothing)
        coupled = decoder.drafts is Drafts.COUPLED
        emitted = pick(context.choices, probs, coupled=coupled, stream=Stream.TARGET, at=here)
        cuts = decoder.stop(context, emitted, torch.ones_like(context.lengths))
        keep = yield from context.commit(emitted, cuts, [DecodeStep(0, 0, 1) for _ in cuts])
        session.select(keep)
        context.select(keep)
        nothing = Proposal(nothing.token_ids[keep], nothing.num_draft_tokens[keep], nothing.draft_probs[keep])


def _laws_after_drafts(
    decoder: Decoder, session: Session, context: Context, proposal: Proposal
) -> Float[Tensor, "batch k_plus_1 vocab"]:
    """The target's law after the last token and after each draft, in one pass."""
    block = torch.cat((context.last_tokens(), proposal.token_ids), 1)
    if proposal.parents is not None:
        return _laws_in_tree(decoder, session, context, proposal, block)
    logits = session.append(block, 1 + proposal.num_draft_tokens)
    return decoder.law(
        logits,
        context.params,
        token_ids=context.with_drafts(proposal.token_ids) if context.reads_prefix else context.token_ids,
        prefix_lengths=context.lengths[:, None] + torch.arange(block.shape[1], device=block.device),
        prompt_lengths=context.prompt_lengths,
    )


def _laws_in_tree(
    decoder: Decoder, session: Session, context: Context, proposal: Proposal, block: Int[Tensor, "batch k_plus_1"]
) -> Float[Tensor, "batch k_plus_1 vocab"]:
    """The same for a tree, whose root is the last token.

    Each entry has a prefix of its own, so where a sampling parameter reads the prefix each becomes a row of its own.
    """
    assert proposal.parents is not None
    above_root = torch.where(proposal.drafted, proposal.parents, -1) + 1
    parents = torch.nn.functional.pad(above_root, (1, 0), value=-1)
    logits = session.append(block, 1 + proposal.num_draft_tokens, parents)
    above = ancestors(parents)
    prefix_lengths = context.lengths[:, None] + depths(above)
    if not context.reads_prefix:
        return decoder.law(
            logits,
            context.params,
            token_ids=context.token_ids,
            prefix_lengths=prefix_lengths,
            prompt_lengths=context.prompt_lengths,
        )
    rows = torch.arange(len(block), device=block.device).repeat_interleave(block.shape[1])
    drafts = block[:, None].expand(above.shape).gather(2, paths(above))[..., 1:].flatten(0, 1)
    return decoder.law(
        logits.flatten(0, 1)[:, None],
        [params for params in context.params for _ in range(block.shape[1])],
        token_ids=context.with_drafts(drafts, rows),
        prefix_lengths=prefix_lengths.view(-1, 1),
        prompt_lengths=context.prompt_lengths[rows],
    ).view_as(logits)


def _emitted(proposal: Proposal, verification: Verification) -> tuple[Int[Tensor, "batch n"], Int[Tensor, " batch"]]:
    """Accepted drafts followed by the target's token, right-padded."""
    accepted, drafts = verification.num_accepted_tokens, proposal.token_ids
    if verification.accepted_nodes is not None:
        drafts = drafts.gather(1, verification.accepted_nodes.clamp(min=0))
    elif proposal.parents is not None:
        msg = "the rule verifies chains, but the drafter proposes trees; use a drafter that `drafter_for` gives"
        raise InternalError(msg)
    emitted = torch.nn.functional.pad(drafts, (0, 1))
    return emitted.scatter(1, accepted[:, None], verification.next_token_ids[:, None]), accepted + 1


def _forget_rejected(session: Session, context: Context, proposal: Proposal, verification: Verification) -> None:
    """The session holds all that was said but the last token."""
    if proposal.parents is None or verification.accepted_nodes is None:
        session.rollback(context.lengths - 1)
        return
    path = torch.nn.functional.pad(
        verification.accepted_nodes + 1, (1, 0)
    )  # of the block, whose root is the last token
    session.keep(path, context.lengths - 1 - session.lengths)


def _steps(
    proposal: Proposal, verification: Verification, cuts: list[tuple[int, FinishReason | None]]
) -> list[DecodeStep]:
    """What each row did in this step; drafts dropped after a stop don't count as accepted."""
    counts, shown = proposal.num_draft_tokens.tolist(), proposal.token_ids.tolist()
    if proposal.parents is not None:  # a path through a tree is no chain of drafts
        shown = [()] * len(shown)
    rows = zip(counts, verification.num_accepted_tokens.tolist(), cuts, shown, strict=True)
    return [
        DecodeStep(count, min(accepted, kept), kept, tuple(ids[:count])) for count, accepted, (kept, _), ids in rows
    ]
