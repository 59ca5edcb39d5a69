"""The table of detections as text: for a terminal, and as the document docs/detection.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specverify.detection import CRITERIA, FIXED_TESTS, NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.detection import Detection
    from specverify.records import Environment

__all__ = ["render_detections", "sentence", "table"]

_LEAST_TV = 0.02
_SOON, _LATEST = 1_000, 20_000
"""Tokens within which a typical fault, and every one of at least that distance, is to be found."""

_ABOUT = """# Detection of structured faults

Written by a script, which plants each fault in the reference decoder over the embedded pair and looks at its stream of tokens in
every way. `TV` is the mean distance of an emitted token's law from the target's, computed exactly at contexts of that stream.

{made}"""

_PROOF = """## Tokens to proof

The e-process of the `lossless` check, at e ≥ 10^6. It may be looked at after each token. `named` is the likeliest of what it
bets on at the end of the round in which proof came, which is when a certificate is written, in most runs; `right` the runs in which that is the fault
or the line of code that is wrong, `alone` those of them in which everything else is a hundredth as likely or less. Else the certificate lists what is
not told apart yet; `misled` are the runs whose list leaves the fault out."""

_FIXED = """## Tests of a fixed number of tokens

On the first of these streams: the first number of tokens on a grid (100, 141, 200, ...) at which each test rejects at 1e-6, and
MMD at 1e-3 (its p-value is a count of permutations). Looking so often is not allowed to them, so this flatters them. `–`: not within
the budget. The PIT's p-values are Bonferroni's over the three orders."""

_IN_USE = """## Criteria in use

What public engines hold speculative decoding to, written anew (`specverify/criteria.py`), given the same budget of tokens. `fails`: the
criterion noticed the fault. In the row of the healthy decoder it is a false alarm, and the column is then worth nothing at this
vocabulary: two of them were made for ten ids."""


def table(found: Sequence[Detection]) -> str:
    """A line a fault."""
    lines = [f"{'':26}{'TV':>7}  {'tokens to proof, median (slowest)':>34}  {'right':>6}  named"]
    for one in found:
        shown = f"{_number(one.median)} ({_number(one.slowest)})"
        right = f"{one.num_named_right}/{len(one.runs)}"
        lines.append(f"{one.fault or 'no fault':26}{one.tv:7.4f}  {shown:>34}  {right:>6}  {_named(one)}")
    return "\n".join(lines)


def sentence(found: Sequence[Detection]) -> str:
    """What was asked of the evidence, and what it gave."""
    structured = [one for one in found if one.fault and one.tv >= _LEAST_TV]
    late = [one for one in structured if one.slowest > _LATEST]
    slow = [one for one in structured if one.median > _SOON]
    misnamed = [one for one in structured if 12 * one.num_named_right < 10 * len(one.runs)]
    said = (
        f"{len(structured) - len(late)} of {len(structured)} faults of TV ≥ {_LEAST_TV} are proved within {_LATEST:,} tokens in "
        f"every run, {len(structured) - len(slow)} within {_SOON:,} in the median; "
        f"{len(structured) - len(misnamed)} are named right in 10 of 12 runs or more"
    )
    for what, those in (("later", late), ("slower", slow), ("misnamed", misnamed)):
        if those:
            said += f"; {what}: " + ", ".join(f"{one.fault} ({_number(one.median)}, {one.named})" for one in those)
    alarms = sum(run.proof_at is not None for one in found if not one.fault for run in one.runs)
    return f"{said}; {alarms} false alarms"


def render_detections(
    found: Sequence[Detection], *, command: str, environment: Environment, date: str, compared: int
) -> str:
    """The document."""
    made = (
        f"`{command}`, {date}; specverify {environment.specverify}, Python {environment.python}, torch {environment.torch}, "
        f"{environment.dtype} on {environment.device} ({environment.cpu}). The tests beside the e-process get {compared:,} tokens."
    )
    names = [f"`{one.fault}`" if one.fault else "no fault" for one in found]
    proof = [
        (
            name, f"{one.tv:.4f}", _number(one.median), _number(one.slowest), f"{one.num_named_right} of {len(one.runs)}",
            str(one.num_alone), str(one.num_misled), _named(one),
        )
        for name, one in zip(names, found, strict=True)
    ]  # fmt: skip
    fixed = [
        (name, _number(one.median), *(_number(one.fixed[test]) for test in FIXED_TESTS))
        for name, one in zip(names, found, strict=True)
    ]
    in_use = [
        (name, *("fails" if one.failed[criterion] else "" for criterion in CRITERIA))
        for name, one in zip(names, found, strict=True)
    ]
    parts = (
        _ABOUT.format(made=made),
        f"{sentence(found)}.",
        _PROOF,
        _markdown(("", "TV", "median", "slowest", "right", "alone", "misled", "named"), proof),
        _FIXED,
        _markdown(("", "e-process", *FIXED_TESTS), fixed),
        _IN_USE,
        _markdown(("", *CRITERIA), in_use),
    )
    return "\n\n".join(parts) + "\n"


def _named(one: Detection) -> str:
    """Nothing was named where nothing was proved."""
    if not any(run.proof_at for run in one.runs):
        return ""
    return one.named if one.num_named_right or not NAMES.get(one.fault) else f"{one.named} (wrong)"


def _number(tokens: float | None) -> str:
    return "–" if tokens is None or not math.isfinite(tokens) else f"{tokens:,.0f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
