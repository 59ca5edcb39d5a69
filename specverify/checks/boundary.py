"""boundary: at the pair's own contexts, the rule decides and draws as chain rejection says, uniform by uniform.

Note [Boundary]: small tables prove the rule's law; here its decisions are looked at where it will be used, at the real
vocabulary and at laws of the real models, and without waiting for chance. A threshold that is 0.1 % off is seen in one
probe, where a stream would need a hundred thousand tokens. Then the rule runs beside a second implementation on the same
uniforms: any coupling bounds TV by the share of mismatches, so none in n draws is a bound of ln(1/δ)/n, at any vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.checks.check import Check, derived_seed, reproduce, sampling, spread
from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.context import pad_vocab
from specverify.records import CheckResult, Finding, Plot, PlotKind, Series, Verdict
from specverify.sampling import probabilities
from specverify.statistics.interval import zero_failures_bound
from specverify.verification import Proposal
from specverify.verification.lossy import LOSSY, bias

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from specverify.models import LanguageModel
    from specverify.plan import Plan
    from specverify.records import SamplingParams
    from specverify.scoring import ScoredTraces
    from specverify.subject import EncodedPrompt, Subject
    from specverify.verification import Rule, Verification

__all__ = ["boundary", "reference_block"]

_RELATIVE = 1e-4
"""How close to the threshold the probes stand."""
_LAW_TOLERANCE = 1e-5
"""TV distance by which the law that the rule draws from may differ from the formula's."""
_PROMPTS = 64
_MOST_CONTEXT = 64
"""Tokens of a prompt's end that make the context: enough for real laws, and cheap."""
_MOST_FINDINGS = 5


@dataclass(frozen=True)
class _Blocks:
    """Laws at consecutive positions of real texts: what a verification step sees."""

    target_probs: Float[Tensor, "blocks k_plus_1 vocab"]
    draft_probs: Float[Tensor, "blocks k vocab"]
    prompts: tuple[EncodedPrompt, ...]

    def at(self, place: int) -> _Blocks:
        """The one-draft blocks that start at this place."""
        return _Blocks(self.target_probs[:, place : place + 2], self.draft_probs[:, place : place + 1], self.prompts)


@dataclass
class _Probe:
    """Choices that answer with one chosen uniform a row, and keep the laws that were drawn from."""

    uniform: Float[Tensor, " batch"]
    laws: list[Float[Tensor, "batch n vocab"]] = field(default_factory=list)

    def accept(
        self, prob: Float[Tensor, "batch n"], *, stream: Stream, at: Int[Tensor, " n"], leading: bool = False
    ) -> Bool[Tensor, "batch n"]:
        del stream, at, leading
        return self.uniform[:, None] < prob

    def draw(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        stream: Stream | Int[Tensor, "batch n"],
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        del stream, at, guesses
        self.laws.append(probs)
        return probs.argmax(-1)

    def race(
        self,
        probs: Float[Tensor, "batch n vocab"],
        *,
        at: Int[Tensor, " n"] | Int[Tensor, "batch n"],
        guesses: Int[Tensor, "batch n"] | None = None,
    ) -> Int[Tensor, "batch n"]:
        return self.draw(probs, stream=Stream.TARGET, at=at, guesses=guesses)

    def moved(self, position: Int[Tensor, " batch"], step: Int[Tensor, " batch"]) -> _Probe:
        del position, step
        return self

    def select(self, rows: Int[Tensor, " rows"]) -> _Probe:
        return replace(self, uniform=self.uniform[rows])


@torch.inference_mode()
def _blocks(subject: Subject, draft: LanguageModel, plan: Plan, params: SamplingParams) -> _Blocks:
    """The last positions of the prompts that are long enough."""
    size = plan.num_speculative_tokens + 1
    prompts = tuple(prompt for prompt in spread(subject.prompts, _PROMPTS) if len(prompt.token_ids) >= size)
    if not prompts:
        empty = torch.zeros(0, size, subject.target.vocab_size, dtype=torch.float64)
        return _Blocks(empty, empty[:, 1:], ())
    texts = [prompt.token_ids[-_MOST_CONTEXT:] for prompt in prompts]
    lengths = torch.tensor([len(text) for text in texts], device=subject.target.device)
    places = lengths[:, None] - torch.arange(size, 0, -1, device=lengths.device)  # [B, k + 1]
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=lengths.device)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)

    def laws(model: LanguageModel) -> Float[Tensor, "batch k_plus_1 vocab"]:
        logits = pad_vocab(model.logits(texts), subject.target.vocab_size)
        rows = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        return probabilities(
            rows, [params] * len(prompts), token_ids=ids, prefix_lengths=places + 1, prompt_lengths=lengths
        )

    return _Blocks(laws(subject.target), laws(draft)[:, :-1], prompts)


def _drafted(blocks: _Blocks, seed: int) -> Int[Tensor, "blocks k"]:
    """Drafts from the blocks' own draft laws."""
    k = blocks.draft_probs.shape[1]
    choices = _philox(blocks, seed)
    return choices.draw(blocks.draft_probs, stream=Stream.DRAFT, at=torch.arange(k, device=blocks.draft_probs.device))


def _philox(blocks: _Blocks, seed: int) -> Philox:
    rows = torch.arange(len(blocks.prompts), device=blocks.target_probs.device)
    return Philox.start(torch.full_like(rows, seed), rows, window=blocks.target_probs.shape[1])


def _proposal(blocks: _Blocks, drafts: Int[Tensor, "blocks k"]) -> Proposal:
    return Proposal(drafts, torch.full_like(drafts[:, 0], drafts.shape[1]), blocks.draft_probs)


# ------------------------------------------------------------------------------------------------ probes


def _probed(rule: Rule, blocks: _Blocks, seed: int) -> tuple[list[Finding], list[tuple[float, bool]]]:
    """One-draft steps with the uniform just below and just above the threshold; each threshold, and whether all was right."""
    drafts = _drafted(blocks, seed)
    p, q = (laws[:, 0].gather(-1, drafts)[:, 0] for laws in (blocks.target_probs, blocks.draft_probs))
    threshold = (p / q).clamp(max=1)
    proposal = _proposal(blocks, drafts)

    def run(uniform: Float[Tensor, " batch"]) -> tuple[Verification, Float[Tensor, "batch vocab"]]:
        probe = _Probe(uniform)
        verification = rule(proposal, blocks.target_probs, probe)
        law = probe.laws[-1][:, -1] if probe.laws else torch.zeros_like(blocks.target_probs[:, 0])
        return verification, law / law.sum(-1, keepdim=True).clamp(min=torch.finfo(law.dtype).tiny)

    below, bonus = run(threshold * (1 - _RELATIVE))
    above, replacement = run(threshold * (1 + _RELATIVE))
    rejectable = threshold * (1 + _RELATIVE) < 1
    residual = (blocks.target_probs[:, 0] - blocks.draft_probs[:, 0]).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=torch.finfo(residual.dtype).tiny)
    off = {
        # at p = 0 nothing lies below: that draft is rejected at every uniform, 0 too, which `above` asks
        "rejected just below the threshold min(1, p/q)": (threshold > 0) & (below.num_accepted_tokens == 0),
        "accepted just above the threshold min(1, p/q)": rejectable & (above.num_accepted_tokens > 0),
        "the replacement of a rejected draft is not drawn from [p - q]+": rejectable
        & (above.num_accepted_tokens == 0)
        & (_tv(replacement, residual) > _LAW_TOLERANCE),
        "the bonus token is not drawn from the target's next row": (below.num_accepted_tokens > 0)
        & (_tv(bonus, blocks.target_probs[:, 1]) > _LAW_TOLERANCE),
    }
    findings = [
        Finding(
            text=f"{text}, in {int(wrong.sum())} of {len(wrong)} probes",
            place=f"{blocks.prompts[first].id}, draft {int(drafts[first])}, p/q = {float(p[first] / q[first]):.6g}",
        )
        for text, wrong in off.items()
        if (first := int(wrong.long().argmax())) >= 0 and bool(wrong.any())
    ]
    right = ~torch.stack(list(off.values())).any(0)
    return findings, list(zip(threshold.tolist(), right.tolist(), strict=True))


def _tv(first: Float[Tensor, "batch vocab"], second: Float[Tensor, "batch vocab"]) -> Float[Tensor, " batch"]:
    return (first - second).abs().sum(-1) / 2


# ------------------------------------------------------------------------------------------------ coupled runs


def reference_block(
    target_probs: Float[np.ndarray, "k_plus_1 vocab"],
    draft_probs: Float[np.ndarray, "k vocab"],
    drafts: list[int],
    uniforms: dict[Stream, Float[np.ndarray, " k_plus_1"]],
) -> list[int]:
    """Chain rejection of one sequence written a second time, literally [Leviathan2023, Alg. 1]; no code is shared."""
    for place, token in enumerate(drafts):
        p, q = target_probs[place], draft_probs[place]
        if not uniforms[Stream.ACCEPT][place] * q[token] < p[token]:
            rest = np.maximum(p - q, 0)
            return [*drafts[:place], _inverse(rest if rest.any() else p, uniforms[Stream.RESIDUAL][place])]
    return [*drafts, _inverse(target_probs[len(drafts)], uniforms[Stream.BONUS][len(drafts)])]


def _inverse(law: Float[np.ndarray, " vocab"], uniform: float) -> int:
    cdf = np.cumsum(law)
    return min(int(np.searchsorted(cdf, uniform * cdf[-1], side="right")), int(np.flatnonzero(law)[-1]))


def _coupled(rule: Rule, blocks: _Blocks, seed: int, draws: int) -> tuple[int, list[Finding]]:
    """The rule beside the reference on the same drafts and uniforms; how many blocks, and those that differ."""
    target_probs, draft_probs = blocks.target_probs.cpu().numpy(), blocks.draft_probs.cpu().numpy()
    findings, done = [], 0
    while done < draws:
        drafts, choices = _drafted(blocks, seed + done), _philox(blocks, seed + done)
        verification = rule(_proposal(blocks, drafts), blocks.target_probs, choices)
        places = torch.arange(target_probs.shape[1], device=drafts.device)
        uniforms = {s: choices.uniform(s, places).cpu().numpy() for s in (Stream.ACCEPT, Stream.RESIDUAL, Stream.BONUS)}
        outcomes = zip(verification.num_accepted_tokens.tolist(), verification.next_token_ids.tolist(), strict=True)
        for row, ((accepted, token), ids) in enumerate(zip(outcomes, drafts.tolist(), strict=True)):
            mine = {stream: values[row] for stream, values in uniforms.items()}
            expected = reference_block(target_probs[row], draft_probs[row], ids, mine)
            if [*ids[:accepted], token] != expected:
                text = f"drafts {ids}: emitted {[*ids[:accepted], token]}, chain rejection emits {expected}"
                findings.append(Finding(text=text, place=f"{blocks.prompts[row].id}, uniforms of seed {seed + done}"))
        done += len(blocks.prompts)
    return done, findings


# ------------------------------------------------------------------------------------------------ the check


def _conclude(subject: Subject, plan: Plan, scored: ScoredTraces) -> CheckResult:
    del scored
    result = CheckResult(
        id="boundary",
        claim=boundary.claim,
        verdict=Verdict.NOT_RUN,
        summary="needs chain rejection in the reference decoder, and a draft model whose law is known",
        reproduce=reproduce(subject, plan, "boundary"),
    )
    if subject.decoder is None or subject.draft is None or subject.rule not in {"chain", *LOSSY}:
        return result
    blocks = _blocks(subject, subject.draft, plan, sampling(subject, plan))
    if not blocks.prompts or plan.num_speculative_tokens == 0:
        return replace(result, summary=f"no prompt has {plan.num_speculative_tokens + 1} tokens, or nothing is drafted")
    if subject.rule in LOSSY:
        return _biased(result, subject.rule, blocks)
    seed = derived_seed(plan.seed, "boundary")
    rule = subject.decoder.rule
    probes = [_probed(rule, blocks.at(place), seed) for place in range(plan.num_speculative_tokens)]
    draws, mismatches = _coupled(rule, blocks, seed, plan.coupled_draws)
    findings = [finding for found, _ in probes for finding in found] + mismatches
    bound = zero_failures_bound(draws, plan.false_fail_rate)
    num_probes = len(blocks.prompts) * plan.num_speculative_tokens
    summary = (
        f"{num_probes} contexts probed at the threshold, {draws:,} steps coupled with a second implementation: no "
        f"difference, so the rule's TV distance is at most {bound:.1g} here (at error rate {plan.false_fail_rate:.0e})"
    )
    if findings:
        summary = f"{findings[0].text} ({findings[0].place}); {len(mismatches)} of {draws:,} coupled steps differ"
    return replace(
        result,
        verdict=Verdict.FAIL if findings else Verdict.PASS,
        summary=summary,
        findings=tuple(findings[:_MOST_FINDINGS]),
        measurements={"num_mismatches": len(mismatches), "code_tv_bound": 1.0 if mismatches else bound},
        num_samples=draws,
        sample_unit="coupled steps",
        smallest_detectable=bound,
        effect_unit="TV distance",
        advice="the finding names the line: threshold, replacement, bonus, or (if probes pass) which uniform is used where"
        if findings
        else "",
        plots=(_plot(sorted(probe for _, probed in probes for probe in probed)),),
    )


def _plot(probed: list[tuple[float, bool]]) -> Plot:
    places = [(100 * rank / len(probed), threshold, right) for rank, (threshold, right) in enumerate(probed, 1)]
    return Plot(
        id="boundary/thresholds",
        title="Thresholds that were probed from both sides",
        x_label="contexts, % with at most this threshold",
        y_label="threshold min(1, p/q)",
        kind=PlotKind.SCATTER,
        series=tuple(
            Series(
                label=label,
                x=tuple(x for x, _, right in places if right is wanted),
                y=tuple(y for _, y, right in places if right is wanted),
            )
            for label, wanted in (("decided and drawn as wanted", True), ("not as wanted", False))
        ),
        caption="Where the wrong ones lie says what is wrong: everywhere, at certain acceptance (1), or where p is 0.",
    )


def _biased(result: CheckResult, name: str, blocks: _Blocks) -> CheckResult:
    """A rule that is lossy by design is never passed; how lossy it is here is exact."""
    k = blocks.draft_probs.shape[1]
    off = bias(LOSSY[name], blocks.target_probs[:, :k].flatten(0, 1), blocks.draft_probs.flatten(0, 1))
    text = (
        f"the rule '{name}' is lossy by design: after one draft the next token's law is off by TV {float(off.mean()):.3f} "
        f"on average, {float(off.max()):.3f} at most, over {len(off)} contexts of this pair"
    )
    return replace(
        result,
        verdict=Verdict.FAIL,
        summary=text,
        findings=(Finding(text=text),),
        measurements={"mean_bias_tv": float(off.mean()), "largest_bias_tv": float(off.max())},
        num_samples=len(off),
        sample_unit="contexts",
        advice="use a lossless rule, or certify the quality of what comes out by other means: it is not the target's",
    )


boundary = Check(
    id="boundary",
    claim="at the pair's own contexts, the rule accepts, replaces and adds exactly as chain rejection says",
    conclude=_conclude,
)
"""No statistics of tokens: probes beside the threshold, and the same uniforms through a second implementation."""
