"""Paths: every outcome with its exact weight, a uniform that is asked twice, and the grid of a dtype."""

from __future__ import annotations

import math

import pytest

from specverify.qualify.paths import NotFollowed, every


def law(program, **kwargs):
    """Outcome to probability."""
    found = {}
    for outcome, weight in every(program, **kwargs):
        found[outcome] = found.get(outcome, 0.0) + weight
    assert math.isclose(sum(found.values()), 1, abs_tol=1e-12)
    return found


def test_a_fork_has_the_weights_that_it_is_given():
    """Normalised; what has none is not taken."""
    assert law(lambda path: path.fork([1, 0, 3])) == {0: 0.25, 2: 0.75}


def test_a_second_question_forks_only_inside_what_the_first_left():
    """Three outcomes, not four."""

    def twice(path):
        uniform = path.uniform()
        return path.below(uniform, 0.5), path.below(uniform, 0.25)

    assert law(twice) == {(True, True): 0.25, (True, False): 0.25, (False, False): 0.5}


def test_independent_operations_see_fresh_uniforms():
    """But one operation sees the same."""

    def twice(path):
        uniform = path.uniform()
        first = path.below(uniform, 0.5), path.below(uniform, 0.5)
        path.next_operation()
        return *first, path.below(uniform, 0.5)

    assert set(law(twice)) == {(True, True, True), (False, False, False)}
    assert set(law(twice, independent=True)) == {(a, a, b) for a in (True, False) for b in (True, False)}


@pytest.mark.parametrize(("steps", "chance"), [(2**8, 2**-8), (2**24, 2**-24), (2**53, 2**-53)])
def test_or_equal_at_zero_has_the_probability_of_an_exact_zero(steps, chance):
    """Strictly below never is."""
    assert law(lambda path: path.below(path.uniform(steps), 0.0, or_equal=True))[True] == chance
    assert law(lambda path: path.below(path.uniform(steps), 0.0)) == {False: 1.0}


def test_nothing_is_below_what_is_no_number():
    """As for real tensors."""
    assert law(lambda path: path.below(path.uniform(), math.nan)) == {False: 1.0}


def test_an_interval_of_no_length_is_never_hit():
    """Inverse cumulative distributions with zeros."""
    assert law(lambda path: path.interval(path.uniform(), [0.0, 0.5, 0.5, 1.0])) == {1: 0.5, 3: 0.5}


def test_too_many_paths_are_not_followed():
    """It says so instead of running for hours."""
    with pytest.raises(NotFollowed, match="more than 10 paths"):
        law(lambda path: tuple(path.fork([1, 1]) for _ in range(5)), most=10)
