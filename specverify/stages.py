"""The four draws of chain rejection, each held against its own law: which of them is wrong?

Note [Stages]: where a trace shows its drafts, a step is no longer one token from p but a draft from q, an acceptance of
probability min(1, p/q), a replacement from norm [p - q]+ and a bonus from p. Each is fair given everything before it, so
each has an e-process of its own. That is not "conditioning on accepted": every draft that was looked at counts, and so
does every acceptance and every rejection. A stage names the line of code that is wrong, where the tokens alone only say
that their law is; and a replacement from a wrong row shows ten times as soon among replacements as among all tokens.

Only chain rejection draws in this way, so stages are tested only where the engine says that this is its rule.

Note [Bets on a draw]: `stage_columns` holds each draw against its law without an idea of what may be wrong. `stage_ratios`
bets on the known faults of each draw, given what was drafted: the replacement of a rejected draft comes from p, or lies
where the uniform that rejected the draft points. That needs a half to a tenth of the tokens. The law of a replacement is
[p - q]+, which rounding can empty: a token of which the scorer sees p just below q may be one of which the engine saw p just
above q. So those bets divide by [p - 0.8 q]+ over Σ [p - q]+, which is never less than the law, and at least by a
hundredth of p + q; none pays more than a hundred, but for the one on another row, whose tokens nothing else explains.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from specverify.pit import randomised_pit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float, Int, Shaped
    from torch import Tensor

    from specverify.records import DecodeTrace

__all__ = ["STAGE_FAULTS", "Role", "drafts_and_roles", "stage_columns", "stage_ratios"]

STAGE_FAULTS = (
    "drafts drawn from a sharper law than the reported one",
    "drafts drawn from a flatter law than the reported one",
    "drafts drawn from the reported law's likeliest ids alone",
    "drafts accepted with the noise that drew them",
    "acceptance ratio inflated",
    "drafts accepted where the target isn't surprised (typical acceptance)",
    "drafts accepted from a target probability on (threshold)",
    "replacement of a rejected draft drawn from the target",
    "replacement of a rejected draft drawn from |p - q|",
    "replacement of a rejected draft drawn from another row",
    "replacement of a rejected draft drawn with the noise that rejected it",
    "replacement of a rejected draft drawn with the noise that drew it",
    "bonus token drawn from the draft",
)
"""Known faults of one draw of chain rejection, in the order of `stage_ratios`."""

_TRUNCATED_TO = 20
_INFLATED_BY = 1.1
_TYPICAL = 0.3
_THRESHOLD = 0.15
_DISCOUNT = 0.8
_MOST_PAID = 100.0
_ROUNDING = 1e-6
"""Residual mass, or distance of an acceptance from 0 and 1, below which rounding decides."""


class Role(IntEnum):
    """How an emitted token came to be."""

    UNKNOWN = 0
    """Its step shows no drafts, or had none."""
    ACCEPTED = 1
    REPLACEMENT = 2
    BONUS = 3


def drafts_and_roles(trace: DecodeTrace) -> list[tuple[int, Role]]:
    """For every emitted token, the id that was drafted in its place (-1: none that is known) and how it came to be.

    Steps that don't add up to the tokens say nothing.
    """
    known: list[tuple[int, Role]] = []
    for step in trace.steps:
        drafts, accepted = step.draft_token_ids, min(step.num_accepted_tokens, len(step.draft_token_ids))
        for place in range(step.num_emitted_tokens):
            if not drafts or place > accepted:
                known.append((-1, Role.UNKNOWN))
            elif place < accepted:
                known.append((drafts[place], Role.ACCEPTED))
            elif accepted < len(drafts):
                known.append((drafts[place], Role.REPLACEMENT))
            else:
                known.append((-1, Role.BONUS))
    steps_fit = len(known) == len(trace.token_ids)
    return known if steps_fit else [(-1, Role.UNKNOWN)] * len(trace.token_ids)


def stage_columns(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], where: Mapping[str, Shaped[Tensor, " n"]]
) -> dict[str, Float[Tensor, " n"]]:
    """One column a stage, NaN at the tokens that it doesn't concern, and `role`.

    `where` says of each token what it is (`token`), what was drafted in its place (`drafted`, -1: nothing), its `role`,
    and the `jitter` of its PIT.

    `accept_prob`: min(1, p/q) of the draft. PIT values: `pit_draft` of the draft under q, `pit_residual` (by falling
    probability) and `pit_residual_id` of a replacement under norm [p - q]+, `pit_bonus` (by q/p) of a bonus token under p.
    """
    names = ("accept_prob", "pit_draft", "pit_residual", "pit_residual_id", "pit_bonus")
    token, drafted, role, jitter = where["token"][:, None], where["drafted"], where["role"], where["jitter"][:, None]
    columns = {name: torch.full_like(where["jitter"], torch.nan) for name in names}
    seen = (drafted >= 0).nonzero()[:, 0]
    if len(seen):
        draft, q_seen = drafted[seen, None], q[seen]
        ratio = p[seen].gather(-1, draft) / q_seen.gather(-1, draft)
        columns["accept_prob"][seen] = ratio.clamp(max=1).nan_to_num(0)[:, 0]
        columns["pit_draft"][seen] = randomised_pit(q_seen, q_seen, draft, jitter[seen])
    replaced = (role == Role.REPLACEMENT).nonzero()[:, 0]
    if len(replaced):
        mass = (p[replaced] - q[replaced]).clamp(min=0)
        total = mass.sum(-1, keepdim=True)
        law = torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), p[replaced])
        for name, key in (("pit_residual", law), ("pit_residual_id", torch.zeros_like(law))):
            columns[name][replaced] = randomised_pit(law, key, token[replaced], jitter[replaced])
    bonus = (role == Role.BONUS).nonzero()[:, 0]
    if len(bonus):
        law = p[bonus]
        order = torch.where(law > 0, q[bonus] / law, -1.0)
        columns["pit_bonus"][bonus] = randomised_pit(law, order, token[bonus], jitter[bonus])
    return {"role": role, **columns}


def stage_ratios(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], where: Mapping[str, Shaped[Tensor, " n"]]
) -> dict[str, Float[Tensor, " n"]]:
    """For each known fault of a draw: what was drawn, its probability under the fault over that under its law.

    1, no bet, at the tokens that the draw doesn't concern (Note [Bets on a draw]). `where` as for `stage_columns`, and the
    `entropy` of p in nats.
    """
    token, drafted, role = where["token"], where["drafted"], where["role"]
    ratios = {name: torch.ones(len(p), dtype=p.dtype, device=p.device) for name in STAGE_FAULTS}
    seen = (drafted >= 0).nonzero()[:, 0]
    replaced = (role == Role.REPLACEMENT).nonzero()[:, 0]
    bonus = (role == Role.BONUS).nonzero()[:, 0]
    if len(seen):
        entropy = where["entropy"][seen, None]
        bets = _draft_bets(p[seen], q[seen], drafted[seen, None], entropy, role[seen] == Role.ACCEPTED)
        for name, bet in zip(STAGE_FAULTS[:7], bets, strict=True):
            ratios[name][seen] = bet
    if len(replaced):
        bets = _replacement_bets(p[replaced], q[replaced], drafted[replaced, None], token[replaced, None])
        for name, bet in zip(STAGE_FAULTS[7:12], bets, strict=True):
            ratios[name][replaced] = bet
    if len(bonus):
        at = token[bonus, None]
        ratios[STAGE_FAULTS[12]][bonus] = _bet(q[bonus].gather(-1, at), p[bonus].gather(-1, at))
    return ratios


def _bet(fault: Float[Tensor, "n 1"], law: Float[Tensor, "n 1"], *, most: float = _MOST_PAID) -> Float[Tensor, " n"]:
    """`fault` over `law`, capped; a capped bet is still fair, and what both call impossible is no bet."""
    paid = torch.where(law > 0, fault / law, torch.where(fault > 0, most, 1.0))
    return paid.clamp(max=most)[:, 0]


def _draft_bets(
    p: Float[Tensor, "n vocab"],
    q: Float[Tensor, "n vocab"],
    draft: Int[Tensor, "n 1"],
    entropy: Float[Tensor, "n 1"],
    accepted: Bool[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], ...]:
    """On how drafts are drawn, then on how they are accepted."""
    q_x, root = q.gather(-1, draft), q.sqrt().sqrt()
    sharper, flatter = root.gather(-1, draft), 1 / root.gather(-1, draft)
    likeliest = q.topk(min(_TRUNCATED_TO, q.shape[-1]), -1).values
    truncated = (q_x >= likeliest[:, -1:]) / likeliest.sum(-1, keepdim=True)
    one = torch.ones_like(q_x)
    p_x = p.gather(-1, draft)
    prob = (p_x / q_x).nan_to_num(1).clamp(max=1)
    above = q.cumsum(-1).gather(-1, draft)
    shared = ((torch.minimum(above, prob) - above + q_x) / q_x).nan_to_num(0).clamp(0, 1)

    def flag(fault: Float[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        law = prob.clamp(_ROUNDING, 1 - _ROUNDING)
        fault = fault.clamp(_ROUNDING, 1 - _ROUNDING)
        return torch.where(accepted, _bet(fault, law), _bet(1 - fault, 1 - law))

    return (
        _bet(sharper / (q * root).sum(-1, keepdim=True), one),
        _bet(flatter / torch.where(q > 0, q / root, 0).sum(-1, keepdim=True), one),
        _bet(truncated, one),
        flag(shared),
        flag(_INFLATED_BY * prob),
        flag(_above(p_x, (_TYPICAL * (-entropy).exp()).clamp(max=_TYPICAL))),
        flag(torch.maximum(prob, _above(p_x, torch.full_like(p_x, _THRESHOLD)))),
    )


def _above(prob: Float[Tensor, "n 1"], threshold: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """1 far above a threshold, 0 far below: where an engine has put it is not known."""
    return prob**4 / (prob**4 + threshold**4)


def _replacement_bets(
    p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"], draft: Int[Tensor, "n 1"], token: Int[Tensor, "n 1"]
) -> tuple[Float[Tensor, " n"], ...]:
    """On where the replacement of a rejected draft comes from, then on whose noise draws it."""
    mass = (p - q).clamp(min=0)
    total = mass.sum(-1, keepdim=True)
    p_x, q_x = p.gather(-1, token), q.gather(-1, token)
    law = torch.maximum((p_x - _DISCOUNT * q_x) / total.clamp(min=_ROUNDING), (p_x + q_x) / _MOST_PAID)
    apart = (p_x - q_x).abs() / (p - q).abs().sum(-1, keepdim=True).clamp(min=_ROUNDING)
    above = mass.cumsum(-1).gather(-1, token) / total.clamp(min=_ROUNDING)
    below = above - mass.gather(-1, token) / total.clamp(min=_ROUNDING)
    refusing = (p.gather(-1, draft) / q.gather(-1, draft)).nan_to_num(1).clamp(max=1)
    drawn_above = q.cumsum(-1).gather(-1, draft)
    drawn_below = drawn_above - q.gather(-1, draft)

    def within(low: Float[Tensor, "n 1"], high: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """The probability of the token if its uniform lies in [low, high)."""
        overlap = (torch.minimum(above, high) - torch.maximum(below, low)).clamp(min=0)
        return overlap / (high - low).clamp(min=_ROUNDING)

    anything = torch.full_like(p_x, 1 / p.shape[-1])  # to its own row the law of another one is as good as uniform
    faults = p_x, apart, anything, within(refusing, torch.ones_like(refusing)), within(drawn_below, drawn_above)
    known = total[:, 0] > _ROUNDING
    return tuple(
        torch.where(known, _bet(fault, law, most=_MOST_PAID**2 if fault is anything else _MOST_PAID), 1.0)
        for fault in faults
    )
