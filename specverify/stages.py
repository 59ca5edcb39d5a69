"""The four draws of chain rejection, each held against its own law: which of them is wrong?

Note [Stages]: where a trace shows its drafts, a step is no longer one token from p but a draft from q, an acceptance of
probability min(1, p/q), a replacement from norm [p - q]+ and a bonus from p. Each is fair given everything before it, so
each has an e-process of its own. That is not "conditioning on accepted": every draft that was looked at counts, and so
does every acceptance and every rejection. A stage names the line of code that is wrong, where the tokens alone only say
that their law is; and a replacement from a wrong row shows ten times as soon among replacements as among all tokens.

Only chain rejection draws in this way, so stages are tested only where the engine says that this is its rule.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from specverify.pit import randomised_pit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Shaped
    from torch import Tensor

    from specverify.records import DecodeTrace

__all__ = ["Role", "drafts_and_roles", "stage_columns"]


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
