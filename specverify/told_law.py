"""Scoring by what an engine says of its own law without speculation, where the target itself can't be loaded here.

Note [Told laws]: with `prompt_logprobs` a server tells, for each token of a text, the log-probabilities of the K likeliest ids
there. Those ids and one atom for all the others are a law that is known exactly, so the randomised PIT of a token (in the
atom, where it is none of the K) is exactly uniform if and only if the engine draws with these probabilities [Czado2009], and
the ratios of the fault laws over those K + 1 cells are bets that a sound engine can't win. What is lost: nothing is seen of
how the others share the atom. What is taken on trust: the engine's own arithmetic; so its own texts without speculation are
held against the same laws first. Temperature 1 and no filter, for any other processed law is not known from K numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specverify.context import pad_vocab
from specverify.errors import SubjectError
from specverify.fault_law import fault_ratios
from specverify.scoring import ScoredTraces, columns_of, places_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Float
    from torch import Tensor

    from specverify.models import LanguageModel
    from specverify.records import DecodeTrace

__all__ = ["score_by_told_laws"]

_TRACES_AT_ONCE = 64
_LEAST = 1e-6
"""Probability of an atom: told numbers are rounded to float32, so what is left of 1 may be too small by about 1e-7, and a bet
on a token in it would then pay out far more than is fair."""


@dataclass(frozen=True)
class _Cells:
    """A told law: its likeliest ids in rising order, each with its probability; the rest is the atom."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    place: int
    """Of the emitted token; the number of ids where it is in the atom."""
    logprob: float
    """The emitted token's own."""


def score_by_told_laws(
    traces: Sequence[DecodeTrace],
    told: Sequence[Sequence[Mapping[int, float]]],
    *,
    top: int,
    draft: LanguageModel | None = None,
) -> ScoredTraces:
    """Score every token by `told[trace][token]`: the log-probabilities of the `top` likeliest ids and of the token itself.

    The columns are those of `scoring.score`, over the cells of Note [Told laws]; `gap` and `first_choice` are exact. A draft that
    can be loaded here makes the fault laws that need it known, too. Raises `SubjectError` where a law is not told.
    """
    parts: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    owners: list[int] = []
    kept = [index for index, trace in enumerate(traces) if trace.token_ids]
    for start in range(0, len(kept), _TRACES_AT_ONCE):
        chunk = kept[start : start + _TRACES_AT_ONCE]
        rows = [traces[index] for index in chunk]
        cells = [
            _cells(law, token, top, trace)
            for index, trace in zip(chunk, rows, strict=True)
            for law, token in _paired(told[index], trace)
        ]
        owners += [index for index in chunk for _ in traces[index].token_ids]
        parts.append(_scored(rows, cells, top, draft))
    if not parts:
        return ScoredTraces(tuple(traces))
    columns, ratios = (
        {name: torch.cat([part[which][name] for part in parts]).double().numpy() for name in parts[0][which]}
        for which in (0, 1)
    )
    columns["trace"] = np.array(owners, dtype=np.float64)
    return ScoredTraces(tuple(traces), columns, ratios)


def _paired(laws: Sequence[Mapping[int, float]], trace: DecodeTrace) -> list[tuple[Mapping[int, float], int]]:
    if len(laws) != len(trace.token_ids):
        msg = f"{len(laws)} laws were told of the {len(trace.token_ids)} tokens of {trace.request.id}, sample {trace.sample}"
        raise SubjectError(msg)
    return list(zip(laws, trace.token_ids, strict=True))


def _cells(law: Mapping[int, float], token: int, top: int, trace: DecodeTrace) -> _Cells:
    """Which ids have a cell of their own must not depend on the token that was emitted, or its PIT would not be uniform."""
    if token not in law or not np.isfinite([value for value in law.values() if value != -np.inf]).all():
        msg = f"the law told of {trace.request.id}, sample {trace.sample}, lacks its own token {token} or holds no numbers"
        raise SubjectError(msg)
    beside = {token} if len(law) > top else set()  # told for its own sake, beside the likeliest
    ids = tuple(sorted(each for each in law if each not in beside))
    place = ids.index(token) if token in ids else len(ids)
    return _Cells(ids, tuple(law[each] for each in ids), place, law[token])


def _scored(
    traces: Sequence[DecodeTrace], cells: Sequence[_Cells], top: int, draft: LanguageModel | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    p = torch.zeros(len(cells), top + 1, dtype=torch.float64)
    for row, each in enumerate(cells):
        p[row, : len(each.logprobs)] = torch.tensor(each.logprobs, dtype=torch.float64).exp()
    place = torch.tensor([each.place if each.place < len(each.token_ids) else top for each in cells])
    p[:, top] = (1 - p[:, :top].sum(-1)).clamp(min=_LEAST)
    p /= p.sum(-1, keepdim=True)
    q = _drafted(draft, traces, cells, top) if draft is not None else None
    where = places_of(traces)
    token = where["token"].clone()
    columns = columns_of(p, q, p.log(), {**where, "token": place})
    own = torch.tensor([each.logprob for each in cells], dtype=torch.float64)
    largest = torch.tensor([max(each.logprobs) for each in cells], dtype=torch.float64)
    impossible = torch.isneginf(own)
    columns |= {
        "token": token,
        "gap": largest - own,
        "first_choice": own == largest,
        "edge": torch.where(impossible, torch.inf, 0.0),
        "in_atom": place == top,
    }
    columns["prob"] = torch.where(impossible, 0.0, columns["prob"])
    return columns, fault_ratios(p, q, place)


@torch.inference_mode()
def _drafted(
    draft: LanguageModel, traces: Sequence[DecodeTrace], cells: Sequence[_Cells], top: int
) -> Float[Tensor, "tokens cells"]:
    """The draft's law over the same cells."""
    sequences = [(*trace.request.prompt_ids, *trace.token_ids)[:-1] for trace in traces]
    logits = pad_vocab(draft.logits(sequences), draft.vocab_size)
    q = torch.zeros(len(cells), top + 1, dtype=torch.float64)
    row = 0
    for number, trace in enumerate(traces):
        for position in range(len(trace.token_ids)):
            law = logits[number, len(trace.request.prompt_ids) - 1 + position].double().softmax(-1).cpu()
            ids = [each for each in cells[row].token_ids if each < len(law)]
            q[row, : len(ids)] = law[torch.tensor(ids, dtype=torch.long)]
            row += 1
    q[:, top] = (1 - q[:, :top].sum(-1)).clamp(min=_LEAST)
    return q / q.sum(-1, keepdim=True)
