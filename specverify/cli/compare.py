"""`specverify compare` holds one certificate, pair or golden against another, or a running server against a baseline."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES, crash_kept_in
from specverify.errors import UsageError
from specverify.report.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.compare.records import Comparison, Side
    from specverify.golden.records import Golden
    from specverify.plan import Plan
    from specverify.records import DecodeTrace
    from specverify.subject import Subject

__all__ = ["compare"]

MAX_PROMPTS, MAX_NEW_TOKENS = 32, 48

Old = Annotated[
    str, typer.Argument(metavar="OLD", help="Certificate, golden's folder, embedded pair, or TARGET,DRAFT.")
]
New = Annotated[
    str | None, typer.Argument(metavar="NEW", help="The same; not needed with --metrics.", show_default=False)
]
AllowedFall = Annotated[
    float, typer.Option("--allowed-fall", metavar="X", min=0, max=1, help="Of acceptance, that is accepted.")
]
MaxPrompts = Annotated[int, typer.Option("--max-prompts", metavar="N", min=2, help="Evenly from every domain.")]
Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="URL", help="Watch the counters of a running server instead of NEW.")
]
Baseline = Annotated[
    float | None,
    typer.Option("--baseline", metavar="RATE", help="Accepted / drafted that is usual.  [default: OLD's lower limit]"),
]
IntervalS = Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between two scrapes, at least 1.")]
DurationS = Annotated[float, typer.Option("--duration", metavar="S", help="Seconds of the watch in all.")]
FalseAlarmRate = Annotated[
    float, typer.Option("--false-alarm-rate", metavar="P", help="Of the whole watch, while nothing fell.")
]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What is the same for both sides."""

    prompts: Path | None
    max_prompts: int
    num_speculative_tokens: int
    seed: int
    device: str | None
    dtype: str | None
    trust_remote_code: bool


def compare(
    old: Old,
    new: New = None,
    *,
    allowed_fall: AllowedFall = 0.01,
    prompts: options.Prompts = None,
    max_prompts: MaxPrompts = MAX_PROMPTS,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    metrics: Metrics = None,
    baseline: Baseline = None,
    interval_s: IntervalS = 15.0,
    duration_s: DurationS = 600.0,
    false_alarm_rate: FalseAlarmRate = 1e-3,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Say what changed in acceptance, by domain and position, and in speed: what a rollout decision needs.

    With --metrics, watch a server's own counters and raise an alarm when acceptance falls below OLD's.
    """
    if (new is None) == (metrics is None):
        msg = "give OLD and NEW, or OLD and --metrics URL"
        raise UsageError(msg)
    if metrics is not None:
        return _watch(
            old, metrics, baseline, interval_s, duration_s, false_alarm_rate, num_speculative_tokens,
            quiet=quiet, as_json=as_json,
        )  # fmt: skip
    shared = _Options(
        prompts=prompts, max_prompts=max_prompts, num_speculative_tokens=num_speculative_tokens or 3,
        seed=17 if seed is None else seed, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with crash_kept_in(Path("specverify-out")):
        report = _compared(old, new or "", shared, allowed_fall)
    _show(report, quiet=quiet, as_json=as_json)
    return EXIT_CODES[report.verdict]


# ------------------------------------------------------------------------------------------------ sides


def _compared(old: str, new: str, shared: _Options, allowed_fall: float) -> Comparison:
    from specverify.compare.difference import compare as held

    return held(*_sides(old, new, shared), allowed_fall=allowed_fall, same=_one_certificate(old, new))


def _one_certificate(old: str, new: str) -> bool:
    """Whether both name the same record, in one file or in two."""
    from specverify.codec import dump
    from specverify.statement import read_certificate

    files = [_certificate_file(name) for name in (old, new)]
    return None not in files and len({dump(read_certificate(file)) for file in files if file is not None}) == 1


def _sides(old: str, new: str, shared: _Options) -> tuple[Side, Side]:
    """Both sides; two pairs of one target, and a pair of a golden's target, are scored over the same texts."""
    from specverify.compare.sides import of_pair, transcripts

    names = (old, new)
    goldens = [_golden(name) for name in names]
    found = [_certificate(name) or _golden_side(golden, name) for name, golden in zip(names, goldens, strict=True)]
    subjects = [
        (None, None) if side is not None else _subject(name, shared) for name, side in zip(names, found, strict=True)
    ]
    texts: Sequence[DecodeTrace] | None = None
    sides: list[Side] = []
    for place, (side, (subject, plan)) in enumerate(zip(found, subjects, strict=True)):
        if side is not None:
            sides.append(side)
            continue
        assert subject is not None
        assert plan is not None
        other = goldens[1 - place]
        if other is not None:
            texts = _recorded_texts(other, subject)
            sides.append(of_pair(subject, plan, names[place], texts))
            continue
        first = subjects[0][0]
        if texts is None or first is None or not _same_target(first, subject):
            texts = transcripts(subject, plan)
        sides.append(of_pair(subject, plan, names[place], texts))
    return sides[0], sides[1]


def _same_target(one: Subject, other: Subject) -> bool:
    from specverify.certify import fingerprints

    digests = [fingerprints(subject)[0] for subject in (one, other)]
    return (digests[0].weights_sha256, digests[0].tokenizer_sha256) == (
        digests[1].weights_sha256,
        digests[1].tokenizer_sha256,
    )


def _certificate(name: str) -> Side | None:
    from specverify.compare.sides import of_certificate
    from specverify.statement import read_certificate

    file = _certificate_file(name)
    return None if file is None else of_certificate(read_certificate(file), name)


def _certificate_file(name: str) -> Path | None:
    path = Path(name)
    file = path / "certificate.json" if path.is_dir() else path
    return file if file.is_file() and file.suffix == ".json" and file.name != "golden.json" else None


def _golden(name: str) -> Golden | None:
    from specverify.golden_file import GOLDEN, read_recording

    path = Path(name)
    folder = path.parent if path.name == GOLDEN else path
    if not (folder / GOLDEN).is_file():
        return None
    return read_recording(folder, command="specverify golden record --reason TEXT").golden


def _golden_side(golden: Golden | None, name: str) -> Side | None:
    from specverify.compare.sides import of_golden

    return None if golden is None else of_golden(golden, name)


def _subject(name: str, shared: _Options) -> tuple[Subject, Plan]:
    """A pair: an embedded one, a folder with `target` and `draft`, or TARGET,DRAFT."""
    from specverify.cli.invocation import Invocation
    from specverify.cli.setup import make_subject
    from specverify.pairs import embedded_pairs

    folder = Path(name)
    target, _, draft = name.partition(",")
    if name in embedded_pairs():
        words: dict[str, str | None] = {"pair": name}
    elif (folder / "target").is_dir() and (folder / "draft").is_dir():
        words = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    elif draft:
        words = {"target": target, "draft": draft}
    else:
        what = "is no certificate, golden or pair" if folder.exists() else "isn't there, and is no embedded pair"
        msg = f"{name!r} {what}; give a certificate.json, a folder of one, or TARGET,DRAFT"
        raise UsageError(msg)
    invocation = Invocation(
        **words,  # type: ignore[arg-type]  # the keys are names of fields
        prompts=shared.prompts, seed=shared.seed, device=shared.device, dtype=shared.dtype,
        num_speculative_tokens=shared.num_speculative_tokens, trust_remote_code=shared.trust_remote_code,
    )  # fmt: skip
    plan = dataclasses.replace(invocation.plan(), max_prompts=shared.max_prompts, max_new_tokens=MAX_NEW_TOKENS)
    return make_subject(invocation, invocation.sources(), plan), plan


def _recorded_texts(golden: Golden, subject: Subject) -> Sequence[DecodeTrace] | None:
    """A golden's sampled texts, if its target is the pair's; else None, and the pair makes its own."""
    from specverify.certify import fingerprints
    from specverify.records import DecodeRequest, DecodeTrace, FinishReason

    if fingerprints(subject)[0].weights_sha256 != golden.weights.fingerprint.weights_sha256:
        return None
    return [
        DecodeTrace(
            request=DecodeRequest(
                id=each.prompt.id, prompt_ids=each.encoding.ids, params=golden.generation.params,
                prompt_id=each.prompt.id, domain=each.prompt.domain,
            ),
            sample=number, token_ids=sample.token_ids, finish=FinishReason.LENGTH,
        )
        for each in golden.prompts
        for number, sample in enumerate(each.decoded.sampled)
    ]  # fmt: skip


def _show(report: Comparison, *, quiet: bool, as_json: bool) -> None:
    from specverify.codec import dump
    from specverify.report.compare import render_comparison

    if as_json:
        typer.echo(dump(report), nl=False)
    elif quiet:
        typer.echo(f"{report.verdict}  {clean(report.headline)}")
    else:
        typer.echo(render_comparison(report))


# ------------------------------------------------------------------------------------------------ a running server


def _watch(
    old: str,
    url: str,
    baseline: float | None,
    interval_s: float,
    duration_s: float,
    false_alarm_rate: float,
    num_speculative_tokens: int | None,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    from specverify.codec import dump
    from specverify.metrics import http_fetch, watch
    from specverify.report.compare import drift_verdict, render_drift

    usual = baseline if baseline is not None else _baseline_of(old)
    seen = watch(
        http_fetch(url),
        baseline=usual,
        interval_s=interval_s,
        duration_s=duration_s,
        false_alarm_rate=false_alarm_rate,
        num_speculative_tokens=num_speculative_tokens,
    )
    verdict = drift_verdict(seen)
    typer.echo(dump(seen) if as_json else render_drift(seen, quiet=quiet), nl=not as_json)
    return EXIT_CODES[verdict]


def _baseline_of(name: str) -> float:
    """Accepted / drafted of a certificate or golden, lowered by as much as the interval of Σ min(p, q) allows."""
    from specverify.compare.sides import of_certificate, of_golden
    from specverify.statement import read_certificate

    golden = _golden(name)
    if golden is not None:
        side, rate = of_golden(golden, name), golden.acceptance_rate
    else:
        found = _certificate(name)
        if found is None:
            msg = f"{name!r} is no certificate or golden, so it states no usual acceptance; give --baseline RATE"
            raise UsageError(msg)
        file = Path(name) / "certificate.json" if Path(name).is_dir() else Path(name)
        checks = {check.id: check for check in read_certificate(file).checks}
        value = checks["acceptance"].measurements.get("acceptance_rate") if "acceptance" in checks else None
        side, rate = (
            of_certificate(read_certificate(file), name),
            float(value) if isinstance(value, (int, float)) else math.nan,
        )
    lowered = rate * side.acceptance.low / side.acceptance.estimate
    if not math.isfinite(lowered) or lowered <= 0:
        msg = f"{name!r} states no acceptance rate with an interval; give --baseline RATE"
        raise UsageError(msg)
    return lowered
