"""A fall is found beyond what is allowed, its absence is passed, and what the data can't tell is inconclusive."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from specverify.codec import dump, load_as
from specverify.compare.difference import compare
from specverify.compare.records import Between, Comparison, PromptAcceptance, Side
from specverify.records import Verdict
from specverify.report.compare import render_comparison

UNKNOWN = Between(estimate=math.nan, low=-math.inf, high=math.inf)


def side(name: str, means: list[float], **changes: object) -> Side:
    prompts = {
        f"p{number}": PromptAcceptance(domain="ab"[number % 2], mean=mean, by_position=(mean, mean - 0.01))
        for number, mean in enumerate(means)
    }
    known = Side(
        name=name, kind="pair", target_sha256="t", tokenizer_sha256="k", draft_sha256=name,
        acceptance=Between(estimate=float(np.mean(means)), low=0.0, high=1.0), prompts=prompts, tokens_per_step=2.0,
    )  # fmt: skip
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]  # fields by name


def bare(name: str, estimate: float, half: float, **changes: object) -> Side:
    """As a certificate keeps it: intervals without prompts."""
    around = Between(estimate=estimate, low=estimate - half, high=estimate + half)
    known = side(name, [estimate], kind="certificate", verdict=Verdict.PASS, acceptance=around, prompts={})
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]  # fields by name


SPREAD = list(np.linspace(0.4, 0.9, 20))


def test_the_same_side_passes() -> None:
    """No change, and an interval of no width: prompts are paired."""
    report = compare(side("a", SPREAD), side("a", SPREAD))
    assert report.verdict is Verdict.PASS
    assert report.acceptance.paired
    assert report.acceptance.difference.low == report.acceptance.difference.high == 0


def test_a_small_fall_shows_though_prompts_differ_much() -> None:
    """Paired by prompt, the prompts' own spread cancels."""
    lower = [mean - 0.03 + 0.002 * (number % 3) for number, mean in enumerate(SPREAD)]
    report = compare(side("a", SPREAD), side("b", lower))
    assert report.verdict is Verdict.FAIL
    assert report.acceptance.fell
    assert "acceptance fell" in report.headline


def test_an_allowed_fall_passes() -> None:
    """What is allowed is said, and no more is asked."""
    lower = [mean - 0.005 for mean in SPREAD]
    assert compare(side("a", SPREAD), side("b", lower), allowed_fall=0.01).verdict is Verdict.PASS


def test_few_noisy_prompts_are_inconclusive() -> None:
    """A fall can't be excluded, so nothing is passed."""
    report = compare(side("a", [0.5, 0.8, 0.7]), side("b", [0.7, 0.6, 0.75]))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "too few prompts" in report.headline


def test_a_fall_in_one_domain_is_found_though_the_mean_stays() -> None:
    """The other domain rose by as much."""
    moved = [mean + (-0.1 if number % 2 else 0.1) for number, mean in enumerate(SPREAD)]
    report = compare(side("a", SPREAD), side("b", moved))
    assert [change.name for change in report.domains if change.fell] == ["b"]
    assert report.verdict is Verdict.FAIL


def test_certificates_are_compared_without_prompts() -> None:
    """Half widths add in square; a large fall shows, a small one is inconclusive."""
    old = bare("a", 0.7, 0.01)
    assert compare(old, bare("b", 0.6, 0.01)).verdict is Verdict.FAIL
    report = compare(old, bare("b", 0.69, 0.01))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert not report.acceptance.paired
    assert abs(report.acceptance.difference.high - (-0.01 + 0.01 * math.sqrt(2))) < 1e-9


def test_a_certificate_beside_itself_is_no_change() -> None:
    """However wide its intervals are; what it says of itself still counts."""
    wide = bare("c", 0.7, 0.2)
    assert compare(wide, wide).verdict is Verdict.INCONCLUSIVE
    report = compare(wide, wide, same=True)
    assert report.verdict is Verdict.PASS
    assert report.acceptance.difference == Between(estimate=0.0, low=0.0, high=0.0)
    assert "one certificate" in render_comparison(report)
    failed = dataclasses.replace(wide, verdict=Verdict.FAIL)
    assert compare(failed, failed, same=True).verdict is Verdict.FAIL


def test_a_certificate_that_fails_refuses_the_rollout() -> None:
    """Whatever its acceptance is."""
    better = bare("b", 0.9, 0.01, verdict=Verdict.FAIL)
    assert compare(bare("a", 0.7, 0.01), better).verdict is Verdict.FAIL


def test_another_target_is_never_passed_on_acceptance_alone() -> None:
    """Texts may change, and a comparison of speeds says nothing of them."""
    report = compare(side("a", SPREAD), side("b", SPREAD, target_sha256="other"))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "golden check" in next(each.text for each in report.findings if each.place == "target")


def test_a_slower_pair_fails() -> None:
    """The speed-up of certificates counts, too."""
    fast, slow = (Between(estimate=each, low=each - 0.05, high=each + 0.05) for each in (1.6, 1.2))
    report = compare(bare("a", 0.7, 0.001, speedup=fast), bare("b", 0.75, 0.001, speedup=slow))
    assert report.verdict is Verdict.FAIL
    assert "speed-up fell" in report.headline


def test_a_comparison_comes_back_from_json_and_reads_as_text() -> None:
    """Infinite ends included."""
    report = compare(side("a", SPREAD), side("b", SPREAD, tokens_per_step=2.1))
    assert load_as(Comparison, dump(report)) == report
    text = render_comparison(report)
    assert "tokens a step" in text
    assert text.startswith("PASS")


def test_figures_stand_apart_with_their_units() -> None:
    """Large ones too: bytes are said as bytes."""
    heavy = dataclasses.replace(side("a", SPREAD), measurements={"peak_memory_bytes": 1.893e9, "target_pass_ms": 5.631})
    text = render_comparison(compare(heavy, heavy))
    assert "  peak_memory_bytes              1.8 GiB   1.8 GiB\n" in text
    assert "  target_pass_ms                 5.63 ms   5.63 ms\n" in text


def test_two_prompts_bound_no_difference_of_shares_beyond_one() -> None:
    """The t interval of two prompts is as wide as it likes; a share is not."""
    change = compare(side("a", [0.1, 0.9]), side("b", [0.5, 0.4])).acceptance
    assert (change.difference.low, change.difference.high) == (-1, 1)


def test_chance_fails_no_more_often_than_stated() -> None:
    """1,000 comparisons of sides that differ by noise alone: a fall beyond what is allowed is rare."""
    generator = np.random.default_rng(3)
    falls = 0
    for _ in range(1_000):
        base = generator.uniform(0.4, 0.9, 12)
        sides = [side(name, list(base + generator.normal(0, 0.02, 12))) for name in "ab"]
        falls += compare(*sides, allowed_fall=0.0).verdict is Verdict.FAIL
    assert falls / 1_000 < 0.025 * 3 + 0.02  # the whole, the domains and the positions, one side of each
