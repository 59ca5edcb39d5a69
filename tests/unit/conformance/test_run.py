"""`run_conformance` in an author's own suite, and which arms are opened for whom."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from specverify.conformance import cells, run, run_conformance
from specverify.conformance.run import opened_arms
from specverify.conformance.told import counters, drafting
from specverify.engines import EngineSettings
from specverify.engines.fake import fake_engine
from specverify.errors import ClaimViolated
from specverify.faults.engine import find_engine_fault
from specverify.records import Verdict

SETTINGS = EngineSettings(target=Path("unread"))


@contextlib.contextmanager
def sound(settings):
    """A factory as an author writes it."""
    yield fake_engine(num_speculative_tokens=settings.num_speculative_tokens)


@contextlib.contextmanager
def faulty(settings):
    """The same, with a fault."""
    engine = find_engine_fault("bonus-counted-accepted").plant(fake_engine())
    engine.target, engine.draft = engine.inner.target, engine.inner.draft
    yield engine


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells, and the OFF arm unasked: what they find is tested elsewhere."""
    for module in (cells, run):
        monkeypatch.setattr(module, "CELLS", (drafting, counters))
    monkeypatch.setattr(cells, "OFF_CELLS", ())


@pytest.fixture(autouse=True)
def known_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever has a target and a draft of its own, as the fake has."""
    from specverify.conformance import laws_of_models
    from specverify.engines.fake import letters

    def laws(engine, settings, plan, **names):
        return laws_of_models(engine.target, engine.draft, eos_token_ids=(0,), seed=plan.seed, detokenize=letters)

    monkeypatch.setattr(run, "laws_of", laws)


def test_a_sound_engine_gives_its_certificate():
    """With the cells that were held."""
    certificate = run_conformance(sound, settings=SETTINGS)
    assert {one.id: one.verdict for one in certificate.checks} == {"drafting": Verdict.PASS, "counters": Verdict.PASS}


def test_a_wrong_engine_fails_the_authors_test_with_its_evidence():
    """An assertion that names the cell and the numbers."""
    with pytest.raises(ClaimViolated, match=r"(?s)not sound: counters failed.*counters: num_accepted_tokens rose by"):
        run_conformance(faulty, settings=SETTINGS)


def test_a_run_of_a_few_cells_lets_no_engine_pass():
    """Without the law and greedy exactness nothing is decided."""
    assert run_conformance(sound, settings=SETTINGS).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("name", "off", "has_off", "has_off2"),
    [
        ("fake", "", True, True),
        ("tests.engines.ten_lines:decode", "", False, False),
        ("tests.engines.ten_lines:decode", "tests.engines.ten_lines:decode", True, False),
        ("tests.engines.ten_lines:from_settings", "", True, True),
    ],
)
def test_arms_of_each_kind_of_engine(name, off, has_off, has_off2):
    """Switched, named by the user, called without a draft, or not to be had."""
    with opened_arms(name, SETTINGS, off=off) as arms:
        assert ((arms.off is not None), (arms.off2 is not None)) == (has_off, has_off2)


def test_p_values_of_another_draft_count_as_one():
    """By Bonferroni; those of `greedy`, which has findings of its own, don't count."""
    from specverify.conformance.run import _named
    from specverify.records import CheckResult, StatisticalTest

    usual = {"allowed": 0.0, "failed": False, "num_samples": 1, "statistic": 0.0}
    p_values = tuple(StatisticalTest(name=f"p{value}", p_value=value, **usual) for value in (0.5, 1e-12, 0.1))
    tests = (StatisticalTest(name="e", log10_e=1.0, **usual), *p_values)
    result = CheckResult(id="lossless", claim="", verdict=Verdict.PASS, summary="", tests=tests)
    named = _named(result, "8 drafts")
    assert [test.name for test in named.tests] == ["8 drafts: e", "8 drafts: smallest of 3, p1e-12"]
    assert named.tests[1].p_value == pytest.approx(3e-12)
    from dataclasses import replace

    assert len(_named(replace(result, id="greedy"), "8 drafts").tests) == 1
