"""Two drafts of one target: paired on the same text, by prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.compare_drafts import compare_drafts, paired_difference
from specverify.errors import PlanError
from specverify.kill_matrix import SMALL_PLAN, small_subject
from specverify.models.hashed import HashedModel
from specverify.records import Verdict
from specverify.scoring import score

SUBJECT = small_subject()
NEARER = HashedModel("nearer", seed=1, near=SUBJECT.target, disturbed_by=0.8)


@pytest.fixture(scope="module")
def compared():
    """The healthy draft, and one that is nearer to the target."""
    return compare_drafts(SUBJECT, NEARER, SMALL_PLAN, tokens=800)


def test_the_nearer_draft_is_accepted_more(compared):
    """The paired interval is far narrower than either draft's own."""
    first, second = compared.expected_acceptance
    assert compared.verdict is Verdict.PASS
    assert compared.difference.estimate == pytest.approx(second.estimate - first.estimate)
    assert compared.difference.high - compared.difference.low < first.high - first.low


def test_it_says_tokens_a_step_at_every_number(compared):
    """More for the nearer draft, and more for more drafts."""
    first, second = compared.tokens_per_step
    assert list(first) == list(second) == list(range(1, 9))
    assert all(second[g].estimate > first[g].estimate for g in first)
    assert first[1].estimate < first[8].estimate


def test_the_other_way_round_it_is_accepted_less_and_itself_is_no_difference():
    """FAIL is for a replacement that is worse; nothing at all is exactly nothing."""
    swapped = compare_drafts(replace(SUBJECT, draft=NEARER), SUBJECT.draft, SMALL_PLAN, tokens=400)
    assert swapped.verdict is Verdict.FAIL
    same = compare_drafts(SUBJECT, SUBJECT.draft, SMALL_PLAN, tokens=400)
    assert same.verdict is Verdict.INCONCLUSIVE
    assert same.difference.estimate == 0


def test_other_text_is_refused():
    """A difference of texts is no difference of drafts."""
    from specverify.checks.check import asked, sampling

    requests = [
        asked(name, SMALL_PLAN, SUBJECT.prompts[:2], sampling(SUBJECT, SMALL_PLAN), speculation=False) for name in "ab"
    ]
    one, other = (
        score(list(SUBJECT.engine.decode(each)), target=SUBJECT.target, draft=SUBJECT.draft) for each in requests
    )
    with pytest.raises(PlanError, match="not paired"):
        paired_difference(one, other)
    with pytest.raises(PlanError, match="leave out --drafter"):
        compare_drafts(replace(SUBJECT, draft=None), NEARER, SMALL_PLAN, tokens=100)
