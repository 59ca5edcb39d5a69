"""Traces to scored traces: the target's own probability, rank, margin and PIT of every emitted token.

Note [Scorer]: the target is the source of truth. It is run teacher-forced over prompt and completion, without a cache and
without the draft, so nothing that the engine does or says can leak into the score. An engine's own log-probabilities are
never used: engines have been seen to report fakes under speculation.

Note [PIT]: u = F(x-) + V p(x) with V uniform of a stream of its own is exactly uniform, token by token and independent of
the past, if and only if x ~ p; F is the target's CDF in an order that may depend on p and q but not on x [Czado2009]. The
order decides what is seen: q/p finds leaks of the draft, p finds temperature and truncation, id finds reused noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.choices import Stream
from specverify.choices.philox import uniform53
from specverify.context import pad_vocab
from specverify.fault_law import fault_ratios
from specverify.parallel import mapped
from specverify.pit import randomised_pit
from specverify.sampling import probabilities
from specverify.spill import Columns, Traces
from specverify.stages import drafts_and_roles, stage_columns, stage_ratios

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from specverify.models import LanguageModel
    from specverify.parallel import Elsewhere
    from specverify.records import DecodeRequest, DecodeTrace, SamplingParams
    from specverify.spill import Spill

__all__ = ["ScoredTraces", "columns_of", "places_of", "score", "score_chunk"]

_ELEMENTS_AT_ONCE = 8_000_000
"""Logits held at a time by each worker (64 MB in float64)."""
_ROWS_AT_ONCE = 64
"""Laws scored at a time: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class ScoredTraces:
    """Traces and, for every emitted token in their order, one entry in each column. Concatenation merges shards.

    Columns: `trace` (index into `traces`), `position`, `token`; `prob`, `rank` (0 is the most probable), `entropy`
    (nats); `edge` (logits by which the token lies outside the support, 0 inside); raw-logit `gap` (largest minus the token's) and `margin` (largest minus second), `first_choice` (the lowest id of the largest); the PIT values `pit_id`,
    `pit_prob`, and with a draft `pit_ratio`, `overlap` (Σ min(p, q)), `posterior` (min(1, q/p) of the token: the
    probability that it was an accepted draft), `preferred` (whether the draft prefers the token, q > p), `preferred_prob` (the
    target's probability of such tokens), and where asked for `role` and the columns of `stages`. `fault_ratios` has the r/p of each fault law.
    """

    traces: Sequence[DecodeTrace] = ()
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    fault_ratios: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Tokens scored."""
        if isinstance(self.columns, Columns):
            return self.columns.rows()
        return len(self.columns["token"]) if self.columns else 0

    def on_disk(self, spill: Spill) -> ScoredTraces:
        """The same, held on disk (Note [Spill])."""
        columns, ratios = (Columns.put(each, spill) for each in (self.columns, self.fault_ratios))
        return ScoredTraces(Traces.put(self.traces, spill), columns, ratios)

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        """A column; empty where nothing was scored."""
        return self.columns.get(column, np.empty(0))

    def where(self, mask: NDArray[np.bool_]) -> ScoredTraces:
        """The tokens of a mask; traces stay, so that indices keep their meaning."""
        return ScoredTraces(self.traces, _picked(self.columns, mask), _picked(self.fault_ratios, mask))

    def merge(self, other: ScoredTraces) -> ScoredTraces:
        """Both, one after the other."""
        if not self.traces and not self.columns:
            return other
        if isinstance(self.traces, Traces) and isinstance(other.traces, Traces):
            traces: Sequence[DecodeTrace] = self.traces.then(other.traces)
        else:
            traces = (*self.traces, *other.traces)
        shift = {"trace": len(self.traces)}
        if not self.columns or not other.columns:  # traces without any token have no columns
            return ScoredTraces(
                traces, self.columns or _shifted(other.columns, shift), self.fault_ratios or other.fault_ratios
            )
        ratios = _joined(self.fault_ratios, other.fault_ratios, {})
        return ScoredTraces(traces, _joined(self.columns, other.columns, shift), ratios)

    def requests(self) -> list[DecodeRequest]:
        """The request of every trace."""
        return self.traces.requests() if isinstance(self.traces, Traces) else [trace.request for trace in self.traces]

    def prompts(self) -> NDArray[np.int64]:
        """For every token, the number of its prompt: the unit by which intervals are clustered."""
        numbers: dict[str, int] = {}
        of_trace = [numbers.setdefault(each.prompt_id or each.id, len(numbers)) for each in self.requests()]
        return np.array(of_trace, dtype=np.int64)[self["trace"].astype(np.int64)]

    def domains(self) -> tuple[list[str], NDArray[np.int64]]:
        """The domains in order, and for every token the number of its prompt's."""
        of_trace = [request.domain for request in self.requests()]
        names = sorted(set(of_trace))
        numbers = np.array([names.index(name) for name in of_trace], dtype=np.int64)
        return names, numbers[self["trace"].astype(np.int64)]


Table = Mapping[str, "NDArray[np.float64]"]


def _picked(columns: Table, mask: NDArray[np.bool_]) -> Table:
    if isinstance(columns, Columns):
        return columns.where(mask)
    return {name: values[mask] for name, values in columns.items()}


def _shifted(columns: Table, shift: Mapping[str, int]) -> Table:
    """What is added to nothing."""
    if isinstance(columns, Columns):
        return columns.shifted(shift)
    return {name: values + shift[name] if name in shift else values for name, values in columns.items()}


def _joined(mine: Table, other: Table, shift: Mapping[str, int]) -> Table:
    """The columns that both have, one after the other."""
    if isinstance(mine, Columns) and isinstance(other, Columns):
        return mine.then(other.shifted(shift))
    later = _shifted(other, shift)
    return {name: np.concatenate((values, later[name])) for name, values in mine.items() if name in later}


def score(
    traces: Sequence[DecodeTrace],
    *,
    target: LanguageModel,
    draft: LanguageModel | None = None,
    stages: bool = False,
    workers: int = 1,
    elsewhere: Elsewhere | None = None,
) -> ScoredTraces:
    """Score every emitted token of `traces` under the target, and against the draft where its law is known.

    `stages` holds each draw of chain rejection against its own law, too; it is for engines that say they follow that rule. With
    `elsewhere`, chunks are scored by other processes that hold the same models.
    Raises `NonFiniteLogits` where a model has no law.
    """
    by_length = sorted(range(len(traces)), key=lambda index: _length(traces[index]))
    sampled = any(not trace.request.params.greedy for trace in traces)
    chunks = list(_chunks([traces[index] for index in by_length], target.vocab_size))
    scored = (
        elsewhere.score(chunks, sampled=sampled, stages=stages)
        if elsewhere is not None
        else mapped(partial(score_chunk, target, draft, sampled, stages), chunks, workers=workers)
    )
    parts = [part for chunk in scored for part in chunk]
    if not parts:
        return ScoredTraces(tuple(traces))
    owner = np.repeat(by_length, [len(traces[index].token_ids) for index in by_length])
    order = np.argsort(owner, kind="stable")  # back to the order of the traces
    in_all = [[name for name in parts[0][i] if all(name in part[i] for part in parts)] for i in (0, 1)]
    columns, ratios = (
        {name: torch.cat([part[i][name] for part in parts]).double().cpu().numpy()[order] for name in in_all[i]}
        for i in (0, 1)
    )
    columns["trace"] = owner[order].astype(np.float64)
    return ScoredTraces(tuple(traces), columns, ratios)


@torch.inference_mode()
def score_chunk(
    target: LanguageModel,
    draft: LanguageModel | None,
    sampled: bool,  # noqa: FBT001 - bound in `score`
    stages: bool,  # noqa: FBT001 - bound in `score`
    chunk: Sequence[DecodeTrace],
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Columns and, where anything is sampled, fault ratios and stages of a chunk, a few rows at a time."""
    p, raw = _laws(target, chunk, target.vocab_size)
    q = _laws(draft, chunk, target.vocab_size)[0] if draft is not None else None
    where = places_of(chunk)
    parts = []
    for start in range(0, len(p), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        laws = p[rows], q[rows] if q is not None else None
        here = {name: values[rows] for name, values in where.items()}
        ratios = fault_ratios(*laws, here["token"].to(p.device)) if sampled else {}
        columns = columns_of(*laws, raw[rows], here)
        columns["edge"] = _distance_to_support(columns["prob"], raw[rows], here, chunk)
        if stages and q is not None and sampled:
            there = {name: values.to(p.device) for name, values in here.items()}
            columns |= stage_columns(p[rows], q[rows], there)
            ratios |= stage_ratios(p[rows], q[rows], {**there, "entropy": columns["entropy"]})
        parts.append((columns, ratios))
    return parts


def _length(trace: DecodeTrace) -> int:
    return len(trace.request.prompt_ids) + len(trace.token_ids)


def _chunks(traces: Sequence[DecodeTrace], vocab_size: int) -> Iterator[Sequence[DecodeTrace]]:
    """Runs of traces whose padded logits fit in `_ELEMENTS_AT_ONCE`; without tokens there is nothing to score."""
    chunk: list[DecodeTrace] = []
    longest = 0
    for trace in traces:
        length = _length(trace)
        if not trace.token_ids:
            continue
        if chunk and max(longest, length) * (len(chunk) + 1) * vocab_size > _ELEMENTS_AT_ONCE:
            yield chunk
            chunk, longest = [], 0
        chunk.append(trace)
        longest = max(longest, length)
    if chunk:
        yield chunk


def _laws(
    model: LanguageModel, traces: Sequence[DecodeTrace], vocab_size: int
) -> tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens vocab"]]:
    """The law before every emitted token, and the raw logits that it came from."""
    sequences = [trace.request.prompt_ids + trace.token_ids for trace in traces]
    logits = pad_vocab(model.logits([ids[:-1] for ids in sequences]), vocab_size)  # [B, L, V]
    places = [(row, len(trace.request.prompt_ids) - 1 + i) for row, trace in enumerate(traces)
              for i in range(len(trace.token_ids))]  # fmt: skip
    row, place = torch.tensor(places, device=logits.device).unbind(1)
    raw = logits[row, place]  # [N, V]
    longest = max(map(len, sequences))
    token_ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences], device=raw.device)
    prompt_lengths = torch.tensor([len(trace.request.prompt_ids) for trace in traces], device=raw.device)
    params: list[SamplingParams] = [traces[index].request.params for index in row.tolist()]
    law = probabilities(
        raw[:, None],
        params,
        token_ids=token_ids[row],
        prefix_lengths=place[:, None] + 1,
        prompt_lengths=prompt_lengths[row],
    )
    return law[:, 0], raw


_BUMPS = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Logits by which a token outside the support is raised, to see how far outside it lies; halved from there on."""
_EDGE_WITHIN = 1.02
"""Factor to which that distance is found."""


def _distance_to_support(
    prob: Float[Tensor, " n"], raw: Float[Tensor, "n vocab"], where: dict[str, Tensor], chunk: Sequence[DecodeTrace]
) -> Float[Tensor, " n"]:
    """0 inside the support; outside, the smallest raise that brings it in, to `_EDGE_WITHIN`, infinite beyond 3 logits.

    Top-k, top-p and min-p cut where the last bits of the logits decide, and an engine's last bits are not the scorer's.
    Logits that are off by B each differ by 2B, and where that alone brings a token in, the raise is 2B at most.
    """
    edge = torch.where(prob > 0, 0.0, torch.inf)
    for index in (prob == 0).nonzero()[:, 0].tolist():
        trace, position, token = (
            chunk[int(where["row"][index])],
            int(where["position"][index]),
            int(where["token"][index]),
        )
        if _inside(raw[index], trace, position, token, _BUMPS[-1]):  # a ban is not lifted by any
            number = next(at for at, bump in enumerate(_BUMPS) if _inside(raw[index], trace, position, token, bump))
            low, high = _BUMPS[max(0, number - 1)], _BUMPS[number]
            while high > _EDGE_WITHIN * low:
                middle = (low * high) ** 0.5
                low, high = (low, middle) if _inside(raw[index], trace, position, token, middle) else (middle, high)
            edge[index] = high
    return edge


def _inside(raw: Float[Tensor, " vocab"], trace: DecodeTrace, position: int, token: int, bump: float) -> bool:
    """Whether the token would be in the support with its logit raised over all that is less than so far ahead.

    Those behind rise with it, for top-p cuts by the mass that is ahead.
    """
    prompt = trace.request.prompt_ids
    raised = raw.double()
    its = raised[token]
    raised = torch.where(raised <= its + bump, torch.minimum(raised, its) + bump, raised)
    raised[token] = its + _EDGE_WITHIN * bump
    law = probabilities(
        raised[None, None],
        [trace.request.params],
        token_ids=torch.tensor([prompt + trace.token_ids], device=raw.device),
        prefix_lengths=torch.tensor([[len(prompt) + position]], device=raw.device),
        prompt_lengths=torch.tensor([len(prompt)], device=raw.device),
    )
    return bool(law[0, 0, token] > 0)


def places_of(traces: Sequence[DecodeTrace]) -> dict[str, Tensor]:
    """What and where every emitted token is, how it came to be, and its jitter; a column each."""
    entries = [
        (row, token, position, trace.request.seed, trace.sample, drafted, role)
        for row, trace in enumerate(traces)
        for position, (token, (drafted, role)) in enumerate(zip(trace.token_ids, drafts_and_roles(trace), strict=True))
    ]
    row, token, position, seed, sample, drafted, role = torch.tensor(entries).unbind(1)
    jitter = uniform53(seed, torch.tensor(Stream.JITTER), sample, position, torch.tensor(0))
    return {"row": row, "token": token, "position": position, "drafted": drafted, "role": role, "jitter": jitter}


def columns_of(
    p: Float[Tensor, "n vocab"],
    q: Float[Tensor, "n vocab"] | None,
    raw: Float[Tensor, "n vocab"],
    where: dict[str, Tensor],
) -> dict[str, Tensor]:
    """All columns of a few tokens."""
    token, jitter = where["token"].to(p.device), where["jitter"].to(p.device)[:, None]
    at = token[:, None]
    p_x = p.gather(-1, at)  # [n, 1]
    top = raw.double().topk(2, -1).values
    columns = {
        "token": token,
        "position": where["position"],
        "prob": p_x[:, 0],
        "rank": (p > p_x).sum(-1),
        "entropy": torch.special.entr(p).sum(-1),
        "gap": top[:, 0] - raw.double().gather(-1, at)[:, 0],
        "margin": top[:, 0] - top[:, 1],
        "first_choice": raw.argmax(-1) == token,
        "pit_id": randomised_pit(p, torch.zeros_like(p), at, jitter),
        "pit_prob": randomised_pit(p, p, at, jitter),
    }
    if q is not None:
        smaller = torch.minimum(p, q)
        columns["pit_ratio"] = randomised_pit(p, torch.where(p > 0, q / p, -1.0), at, jitter)
        columns["overlap"] = smaller.sum(-1)
        columns["posterior"] = (smaller.gather(-1, at) / p_x).nan_to_num(0)[:, 0]
        columns["preferred"] = (q > p).gather(-1, at)[:, 0]
        columns["preferred_prob"] = torch.where(q > p, p, 0).sum(-1)
    return columns
