"""What two records show, and what one shows in text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.bench import BenchReport, Comparison, compared
from specverify.codec import dump, load_as
from specverify.records import Environment, Verdict
from specverify.report.bench import change_table, comparison_table

HERE = Environment(
    specverify="0", python="3", torch="2", transformers="5", device="cpu", dtype="float32", num_threads=1, platform="p",
    cpu="a processor",
)  # fmt: skip


def record(slower=1.0, environment=HERE):
    """A contender that is twice as fast as its baseline, or `slower` than that."""
    baseline = (2.0, 2.1, 1.9, 2.0, 2.05, 4.0)
    raw = tuple(slower * each / 2 for each in baseline)
    comparison = Comparison(
        id="verification/V=9", name="fused", baseline="naive", raw_s=raw, baseline_s=baseline, units=11, unit="rows",
        num_bytes=4e9,
    )  # fmt: skip
    return BenchReport(
        created="now", command="specverify bench", environment=environment, load_per_core=0.5, comparisons=(comparison,),
        not_run=("flashinfer: not installed",),
    )  # fmt: skip


def test_a_ratio_is_of_pairs():
    """So a turn that was slow for both changes nothing."""
    ratio = record().comparisons[0].ratio
    assert ratio.estimate == ratio.low == ratio.high == pytest.approx(2)


@pytest.mark.parametrize(
    ("slower", "environment", "verdict"),
    [
        (1.0, HERE, Verdict.PASS),
        (0.5, HERE, Verdict.PASS),
        (1.5, HERE, Verdict.FAIL),
        (1.5, replace(HERE, cpu="another"), Verdict.INCONCLUSIVE),
        (1.0, replace(HERE, num_threads=4), Verdict.INCONCLUSIVE),
    ],
)
def test_two_records(slower, environment, verdict):
    """A worse ratio fails on the same machine alone."""
    (change,) = compared(record(), record(slower, environment))
    assert change.verdict is verdict
    assert "was 2.00x" in change.text
    assert str(verdict) in change_table([change])


def test_records_without_a_common_contender_say_so():
    """Rather than pass."""
    new = replace(record(), comparisons=(replace(record().comparisons[0], name="other"),))
    assert compared(record(), new) == ()
    assert "nothing in common" in change_table(())


def test_a_record_survives_its_file():
    """With all raw times."""
    assert load_as(BenchReport, dump(record())) == record()


def test_the_table_names_machine_baseline_and_what_was_left_out():
    """And warns of the load."""
    text = comparison_table(record())
    for part in ("a processor", "load 0.5", "times the speed of naive", "2.00x", "GB/s", "flashinfer: not installed"):
        assert part in text
