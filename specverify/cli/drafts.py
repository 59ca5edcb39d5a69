"""`specverify drafts`: two drafts of one target, on the same text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES
from specverify.cli.invocation import Invocation
from specverify.errors import UsageError
from specverify.pairs import embedded
from specverify.report.text import clean

if TYPE_CHECKING:
    from specverify.compare_drafts import DraftComparison

__all__ = ["drafts"]

First = Annotated[str | None, typer.Argument(metavar="FIRST", help="The draft in use.", show_default=False)]
Second = Annotated[
    str | None, typer.Argument(metavar="SECOND", help="The draft that may replace it.", show_default=False)
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=100, help="Of target-only text.")]


def drafts(
    target: options.Target = None,
    first: First = None,
    second: Second = None,
    *,
    prompts: options.Prompts = None,
    tokens: Tokens = 4_000,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Say which of two drafts a target accepts more, on the same text of its own; without arguments, of embedded drafts.

    Ends with 0 if the second is accepted more, with 1 if it is accepted less, with 3 if that is not settled.
    """
    from specverify.cli.setup import make_subject
    from specverify.compare_drafts import compare_drafts

    if target is None:
        marginal, distilled = embedded("embedded-marginal"), embedded()
        target, first, second = str(distilled.target), str(marginal.draft), str(distilled.draft)
    if first is None or second is None:
        msg = f"{target} needs two drafts after it: the one in use, and the one that may replace it"
        raise UsageError(msg)
    subjects = []
    for draft in (first, second):
        invocation = Invocation(
            target=target, draft=draft, prompts=prompts, budget="quick", seed=seed, device=device, dtype=dtype
        )
        plan = invocation.plan()
        subjects.append(make_subject(invocation, invocation.sources(), plan))
    other = subjects[1].draft
    assert other is not None
    compared = compare_drafts(subjects[0], other, plan, tokens=tokens)
    if as_json:
        typer.echo(json.dumps({"verdict": compared.verdict, **asdict(compared)}, indent=2))
    else:
        named = f"first:  {clean(first)}\nsecond: {clean(second)}\n\ntokens a step, with 95 % intervals\n"
        typer.echo(_sentence(compared) if quiet else f"{named}{_table(compared)}\n\n{_sentence(compared)}")
    return EXIT_CODES[compared.verdict]


def _table(compared: DraftComparison) -> str:
    """Tokens a step of each, by number of speculative tokens."""
    lines = [f"{'speculative tokens':>18}  {'first':>22}  {'second':>22}"]
    for number in compared.tokens_per_step[0]:
        cells = [
            f"{each[number].estimate:.2f} [{each[number].low:.2f}, {each[number].high:.2f}]"
            for each in compared.tokens_per_step
        ]
        lines.append(f"{number:>18}  {cells[0]:>22}  {cells[1]:>22}")
    return "\n".join(lines)


def _sentence(compared: DraftComparison) -> str:
    first, second = compared.expected_acceptance
    apart = compared.difference
    words = {"PASS": "more", "FAIL": "less", "INCONCLUSIVE": "neither more nor less, as far as this text shows,"}
    return (
        f"the second draft is accepted {words[compared.verdict]} than the first: Σ min(p, q) {second.estimate:.3f} against "
        f"{first.estimate:.3f}, difference {apart.estimate:+.4f} [{apart.low:+.4f}, {apart.high:+.4f}] over "
        f"{compared.num_tokens:,} tokens of {compared.num_prompts} prompts"
    )
