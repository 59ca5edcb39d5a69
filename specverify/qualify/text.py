"""How a failed claim reads: the claim, by how much, the smallest example as a table, what to look at. Plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from specverify.qualify.claims import ClaimResult, Example
    from specverify.qualify.instances import Instance

__all__ = ["example_lines", "failure"]

_WIDTH = 12
_MOST_ROWS = 14


def failure(result: ClaimResult, *, reproduce: str = "") -> str:
    """One failed claim."""
    lines = [f"{result.id} {result.verdict}: {result.summary}", "", _labelled("claim", result.claim)]
    if result.effect is not None:
        lines.append(
            _labelled("effect", f"{result.effect:.3g} at most over {result.num_instances} instances, {result.method}")
        )
    if result.example is not None:
        hints = result.example.deviation.hints
        lines += [_labelled("looks like", hint) for hint in hints[:2]]
        lines += ["", *(f"  {line}" for line in example_lines(result.example)), ""]
    if result.advice:
        lines.append(_labelled("what to do", result.advice))
    return "\n".join([*lines, *(["", f"Reproduce: {reproduce}"] if reproduce else [])])


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}"


def example_lines(example: Example) -> list[str]:
    """The two laws in fractions, and what was expected and seen."""
    instance, deviation = example.instance, example.deviation
    drafts = f"{instance.num_drafts} draft" + ("s" if instance.num_drafts > 1 else "")
    lines = [f"smallest example: {instance.vocab_size} ids, {drafts}", "", *_laws(instance)]
    if deviation.table:
        label = max(len(each[0]) for each in deviation.table)
        lines += ["", f"{deviation.place}:", f"{'':<{label}}  {'expected':>10}  {'actual':>10}"]
        lines += [f"{said:<{label}}  {expected:>10.6g}  {actual:>10.6g}" for said, expected, actual in deviation.table]
    return lines


def _laws(instance: Instance) -> list[str]:
    """Target and draft rows by prefix; deep ones are cut."""
    prefixes = sorted(instance.target, key=lambda prefix: (len(prefix), prefix))
    cells = [
        (" ".join(map(str, prefix)) or "(nothing)", _row(instance.target[prefix]), _row(instance.draft.get(prefix, ())))
        for prefix in prefixes
    ]
    shown = [("after", "target p", "draft q"), *cells[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"{after:<{widths[0]}}  {p:<{widths[1]}}  {q}".rstrip() for after, p, q in shown]
    return lines + ([f"... and {len(cells) - _MOST_ROWS} more"] if len(cells) > _MOST_ROWS else [])


def _row(row: Sequence[Fraction]) -> str:
    return "  ".join(f"{each!s:<4}" for each in row).rstrip()
