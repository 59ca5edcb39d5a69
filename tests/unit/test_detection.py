"""Detection of structured faults on models of 24 ids: what is counted, what is named, what it is compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specverify import criteria
from specverify.detection import CRITERIA, FIXED_TESTS, NAMES, detections, known_faults
from specverify.errors import PlanError
from specverify.fault_law import NOISE_LAWS
from specverify.faults import find_fault
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.records import Environment
from specverify.report.detection import render_detections, sentence, table
from specverify.step_law import step_distance

PLANTED = ("residual-from-target", "draft-noise-in-accept", "accept-or-equal")


@pytest.fixture(scope="module")
def found():
    """Three faults, one of which no stream shows."""
    return list(detections(small_subject(), SMALL_PLAN, known_faults(PLANTED), tokens=600, compared=400, runs=2))


def test_structured_faults_are_proved_and_named(found):
    """The healthy decoder first, without proof; then each fault, until its proof."""
    healthy, residual, noise, invisible = found
    assert [one.fault for one in found] == ["", *PLANTED]
    for one in (residual, noise):
        assert one.slowest <= 600
        assert one.num_named_right == 2
        assert one.tv > 0.02
    for one in (healthy, invisible):
        assert one.median == float("inf")
        assert one.num_named_right == 0
        assert one.tv < 1e-9


def test_every_test_and_criterion_is_asked(found):
    """Each has a column, and the healthy decoder is rejected by no test that has a promised rate."""
    for one in found:
        assert list(one.fixed) == list(FIXED_TESTS)
        assert list(one.failed) == list(CRITERIA)
    assert set(found[0].fixed.values()) == {None}
    assert found[1].fixed["KS of the PIT"] or found[1].fixed["chi-square of one context"]


def test_report_names_what_falls_short(found):
    """The sentence counts, the table has a line a fault, the document its command."""
    assert sentence(found).startswith("2 of 2 faults of TV ≥ 0.02 are proved within 20,000 tokens")
    assert len(table(found).splitlines()) == len(found) + 1
    made_in = Environment(
        specverify="0", python="3", torch="2", transformers="5", device="cpu", dtype="float32", num_threads=1,
        platform="p", cpu="c",
    )  # fmt: skip
    text = render_detections(found, command="specverify detection", environment=made_in, date="today", compared=400)
    assert text.count("| `residual-from-target` |") == 3
    assert "specverify detection" in text


def test_an_unknown_fault_or_no_draft_is_a_mistake():
    """Said before anything is decoded."""
    with pytest.raises(PlanError, match="none of the structured faults"):
        known_faults(["seed-ignored"])
    assert {fault.name for fault in known_faults()} == set(NAMES)
    with pytest.raises(PlanError, match="leave out --drafter"):
        next(detections(replace(small_subject(), draft=None), SMALL_PLAN, (), tokens=100, compared=100, runs=1))


CONTEXTS = [(1, 2, 3), (4, 5, 6, 7)]


def test_a_healthy_step_has_no_distance():
    """Every context, drafts and bonus."""
    healthy = small_subject()
    distance = step_distance(healthy.decoder, healthy.draft, CONTEXTS)
    assert max(distance.token, distance.bonus) < 1e-12


@pytest.mark.parametrize("name", ["residual-from-target", "residual-wrong-row", "raw-draft-probs", *NOISE_LAWS])
def test_a_wrong_step_is_as_far_as_its_samples(name):
    """The distance that is computed is the one that 6,000 first tokens show."""
    from specverify.context import Row
    from specverify.decoding import speculative
    from specverify.records import DecodeRequest, SamplingParams
    from specverify.step_law import _law

    healthy = small_subject()
    decoder = find_fault(name).apply(healthy.decoder)
    request = DecodeRequest(id="s", prompt_ids=CONTEXTS[0], params=SamplingParams(max_new_tokens=2), seed=5)
    traces = speculative(replace(decoder, num_speculative_tokens=1), [Row(request, n) for n in range(6_000)])
    law = _law(healthy.target, [CONTEXTS[0]], healthy.target.vocab_size)[0].numpy()
    shares = np.bincount([trace.token_ids[0] for trace in traces], minlength=len(law)) / 6_000
    computed = step_distance(decoder, healthy.draft, CONTEXTS[:1], fault=name).token
    assert computed > 0.02
    assert abs(np.abs(shares - law).sum() / 2 - computed) < 0.025


def test_bonus_from_the_draft_is_wrong_in_the_bonus_alone():
    """And counts by the share of bonus tokens."""
    healthy = small_subject()
    distance = step_distance(find_fault("bonus-from-draft").apply(healthy.decoder), healthy.draft, CONTEXTS)
    assert distance.token < 1e-12
    assert distance.bonus > 0.1
    assert distance.per_token(0.25) == pytest.approx(0.25 * distance.bonus)


# ------------------------------------------------------------------------------------------------ criteria in use

LAW = np.arange(1.0, 11) / 55


def drawn(law: np.ndarray, size: int = 100_000, seed: int = 0) -> np.ndarray:
    """Tokens of a law over ten ids."""
    return np.random.default_rng(seed).choice(len(law), size, p=law)


def test_criteria_pass_what_is_right():
    """At the vocabulary that they were made for."""
    assert criteria.distance_ratio(drawn(LAW), LAW)
    assert criteria.close_kl(drawn(LAW), drawn(LAW, seed=1), LAW)
    assert criteria.close_tv(drawn(LAW), LAW)
    assert criteria.within_tolerance(drawn(LAW), LAW)
    assert criteria.same_texts([(1, 2)], [(1, 2)], least=1)
    assert criteria.close_acceptance_length(2.01, 2.0)
    assert criteria.enough_acceptance_length(2.5, 2.0)


def test_criteria_fail_what_is_far_off():
    """Each on its own coarse fault."""
    wrong = LAW[::-1]
    assert not criteria.distance_ratio(drawn(wrong), LAW)
    assert not criteria.close_kl(drawn(wrong), drawn(LAW), LAW)
    assert not criteria.close_tv(drawn(wrong), LAW)
    assert not criteria.within_tolerance(drawn(wrong), LAW)
    assert not criteria.same_texts([(1, 2), (3,)], [(1, 3), (3,)], least=0.6)
    assert not criteria.close_acceptance_length(2.1, 2.0)
    assert not criteria.enough_acceptance_length(1.8, 2.0)
