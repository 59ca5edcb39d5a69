"""Whole functions: right ones of every shape pass, wrong ones are blamed for what is wrong, and how that reads."""

from __future__ import annotations

import math
import re

import pytest
import torch

from specverify.errors import PlanError, SubjectError
from specverify.qualify import load_rule, qualify
from specverify.qualify.claims import CLAIMS, Exact
from specverify.qualify.instances import instances, random_instance, shrunk
from specverify.qualify.laws import outcomes, subject
from specverify.qualify.measures import Case, acceptance, lossless
from specverify.qualify.paths import NotFollowed
from specverify.qualify.randomness import Drawn, Edge
from specverify.qualify.shapes import SHAPES, detect, find_shape
from specverify.qualify.text import failure
from specverify.records import Verdict
from tests.unit.qualify import verifiers

BY_ID = {claim.id: claim for claim in CLAIMS}
RIGHT = [
    ("vllm_style", "vllm"),
    ("chain_speculative_sampling", "flashinfer"),
    ("chain_with_uniform_samples", "flashinfer"),
    ("plain", "plain"),
    ("plain_with_uniforms", "plain"),
    ("plain_batch", "plain-batch"),
]


@pytest.mark.parametrize(("name", "shape"), RIGHT)
def test_a_right_function_has_the_targets_law_and_its_shape_is_told(name, shape):
    """On all but the largest instance, in its own shape."""
    exact = Exact(subject(name, getattr(verifiers, name)))
    assert exact.subject.shape.name == shape
    assert not exact.law_is_wrong()


def test_a_right_function_passes_every_claim():
    """Ragged, batched, without draft probabilities, in float32 and bfloat16."""
    found = qualify(verifiers.vllm_style)
    assert {result.id: result.verdict for result in found.claims} == dict.fromkeys(BY_ID, Verdict.PASS)
    assert found.method == "exact"


def test_transformers_own_function_is_lossless_but_for_a_uniform_of_exactly_0():
    """`r <= p/q` lets a draft of probability 0 pass at r = 0: 2^-24 of the draws in float32."""
    found = qualify(load_rule("transformers.generation.utils:_speculative_sampling"))
    failed = [result for result in found.claims if result.verdict is Verdict.FAIL]
    assert [result.id for result in failed] == ["support"]
    assert "6e-08 in float32" in failed[0].summary


@pytest.mark.parametrize(
    ("name", "blamed", "looks_like"),
    [
        ("reused_uniform", "streams", ""),
        ("residual_from_wrong_row", "residual", "it takes p from the row after the rejected token"),
        ("vllm_style_neighbours", "rows", ""),
        ("fewer_drafts", "ragged", ""),
    ],
)
def test_a_wrong_function_is_blamed_for_what_is_wrong(name, blamed, looks_like):
    """One failure, that reads."""
    found = qualify(getattr(verifiers, name), name=name)
    assert found.verdict is Verdict.FAIL
    assert found.blamed is not None
    assert found.blamed.id == blamed
    assert looks_like in failure(found.blamed)
    special = [each for each in found.claims if BY_ID[each.id].needs_the_law]
    if blamed in ("streams", "residual"):
        assert {each.verdict for each in special} == {Verdict.NOT_RUN}


@pytest.mark.parametrize(
    ("name", "claim_id", "said"),
    [
        ("half_ratio", "acceptance", ("in all should have been rejected", "so little is rounding: the ratio")),
        ("residual_of_the_row_before", "residual", ("looks like  it is the residual of the row before",)),
    ],
)
def test_a_failure_says_what_it_looks_like(name, claim_id, said):
    """A deviation of a ten-thousandth is told as one, not as two figures that look alike."""
    text = failure(BY_ID[claim_id].result(Exact(subject(name, getattr(verifiers, name)))))
    for part in said:
        assert part in text


def test_a_failure_reads_in_one_piece():
    """Claim, effect, the laws in fractions, expected and actual, what to do, how to see it again."""
    result = BY_ID["residual"].result(Exact(subject("wrong", verifiers.residual_from_wrong_row)))
    text = failure(result, reproduce="specverify qualify --rule m:f --seed 0")
    assert text.splitlines()[0] == (
        "residual FAIL: it replaces rejected drafts by another law, TV 0.5 in 25% of the steps that get there"
    )
    for part in (
        "claim",
        "effect",
        "smallest example: 2 ids, 1 draft",
        "1/4   3/4",
        "expected",
        "what to do",
        "Reproduce:",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_cannot_be_followed_is_sampled_and_says_so():
    """A ratio that is too large is found."""
    found = qualify(verifiers.normal_noise_accepting_more)
    assert found.method.startswith("sampled: it draws by torch's randn")
    assert found.blamed is not None
    assert found.blamed.id == "acceptance"
    assert {each.method for each in found.claims if each.verdict is Verdict.FAIL} == {"sampled"}


def test_random_numbers_from_elsewhere_are_noticed():
    """A path that ends otherwise when it is taken again isn't torch's doing."""
    with pytest.raises(NotFollowed, match="draws from elsewhere than torch"):
        BY_ID["answers"].result(Exact(subject("own", verifiers.seed_ignored)))


def compiled(draft_ids, draft_probs, target_probs, uniforms):
    """As a compiled kernel reads its arguments: past torch's Python."""
    with torch._C.DisableTorchFunction():
        return verifiers.plain_with_uniforms(draft_ids, draft_probs, target_probs, uniforms.clone())


def powers(draft_ids, draft_probs, target_probs):
    """Arithmetic that a number which wasn't drawn doesn't have."""
    return [int(torch.rand(1).item() ** 2 < target_probs[0, 0])]


@pytest.mark.parametrize(("function", "said"), [(compiled, "compiled kernel"), (powers, "wasn't drawn")])
def test_what_reads_past_torch_is_not_mistaken_for_a_law(function, said):
    """It would read numbers that mean nothing."""
    with pytest.raises(NotFollowed, match=said):
        BY_ID["answers"].result(Exact(subject("past torch", function, "plain")))


def wrong_answers():
    def too_many(draft_ids, draft_probs, target_probs):
        return [*draft_ids.tolist(), 0, 0]

    def other_drafts(draft_ids, draft_probs, target_probs):
        return [1 - draft_ids[0].item(), 0]

    def outside(draft_ids, draft_probs, target_probs):
        return [99]

    def nothing(draft_ids, draft_probs, target_probs):
        return None

    return [too_many, other_drafts, outside, nothing]


@pytest.mark.parametrize("function", wrong_answers(), ids=lambda function: function.__name__)
def test_an_answer_that_is_none_fails_the_first_claim(function):
    """And the others aren't asked."""
    found = qualify(function, shape="plain")
    assert found.claims[0].verdict is Verdict.FAIL
    assert {each.verdict for each in found.claims[1:]} == {Verdict.NOT_RUN}


def test_a_count_that_is_not_the_ids_own_is_an_error():
    """Counters of accepted drafts are part of the answer."""

    def miscounting(draft_ids, draft_probs, target_probs):
        return [int(target_probs[0].argmax())], 5

    asked = subject("miscounting", miscounting, "plain")
    one = random_instance(3, 1, seed=0)
    with pytest.raises(SubjectError, match=r"its count is \[5\] where its ids have \[0\]"):
        outcomes(asked, [one], [1], Drawn(0))


def test_a_signature_of_no_shape_lists_the_shapes():
    """One sentence that says what to do."""
    with pytest.raises(PlanError, match="none of the known call shapes") as error:
        detect(lambda a, b: None)
    assert all(shape.name in str(error.value) for shape in SHAPES)
    with pytest.raises(PlanError, match="known: specverify, transformers"):
        find_shape("vlm")


def test_a_parameter_without_a_value_is_named():
    """Rather than a TypeError from inside the call."""

    def needs_more(draft_ids, draft_probs, target_probs, temperature):
        return temperature

    with pytest.raises(PlanError, match="no value for the parameter 'temperature'"):
        outcomes(subject("more", needs_more, "plain"), [random_instance(2, 1, seed=0)], [1], Drawn(0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nocolon", "names no function"),
        ("no_such_module:f", "can't be imported"),
        ("torch:no_such", "has no no_such"),
        ("torch:float32", "not a function"),
    ],
)
def test_a_rule_that_is_not_there_is_a_sentence(name, said):
    """Each mistake has its own."""
    with pytest.raises(PlanError, match=said):
        load_rule(name)


def test_edge_uniforms_are_zero_wherever_they_come_from():
    """Handed over, or asked of torch."""
    edge = Edge()
    with edge.entered():
        assert torch.rand(3).tolist() == [0, 0, 0]
        assert torch.ones(2).uniform_().tolist() == [0, 0]
    assert edge.uniforms((2,), torch.float64).tolist() == [0, 0]


def test_instances_are_laws_and_sorted_by_size():
    """Fractions that add up to 1; the first failure is the smallest."""
    made = instances(seed=3)
    assert [one.size for one in made] == sorted(one.size for one in made)
    for one in made:
        assert all(sum(row) == 1 and min(row) >= 0 for row in [*one.target.values(), *one.draft.values()])
        assert len(one.target) == sum(one.vocab_size**length for length in range(one.num_drafts + 1))
    assert any(0 in one.target[()] for one in made)


def test_shrinking_keeps_what_fails_and_makes_it_simpler():
    """Only rows that matter stay complicated."""
    start = random_instance(3, 1, seed=1, denominator=16)
    smallest = shrunk(start, lambda one: one.target[()] == start.target[()])
    assert smallest.target[()] == start.target[()]
    assert smallest.size < start.size
    assert {each.denominator for each in smallest.draft[()]} <= {1, 2, 3, 4}


def test_the_law_of_a_block_is_continued_by_the_target():
    """An emitted draft alone is no statement about what follows it."""
    asked = subject("plain", verifiers.plain_with_uniforms)
    one = random_instance(2, 2, seed=5, denominator=4)
    case = Exact(asked).case(one)
    assert math.isclose(sum(case.law.values()), 1)
    assert lossless(case).effect < 1e-12
    always = {outcome: weight for outcome, weight in case.law.items() if outcome.num_accepted == 2}
    assert lossless(Case(one, always, torch.float64, logits=False, num_drafts=2)).effect > 0.1


def test_more_acceptance_is_told_of_the_id_that_has_it() -> None:
    """The sums may agree to the last digit ("0.75 where 0.75") though single ids don't."""
    found = []
    for one in instances():
        deviation = acceptance(Exact(subject("greedy", load_rule("greedy"))).case(one))
        said = re.fullmatch(
            r"accepts id \d+ with probability (\S+) where min\(p, q\) is (\S+); \S+ in all should have been rejected",
            deviation.said,
        )
        if deviation.effect > 1e-9:
            assert said is not None
            found.append((said[1], said[2]))
        if len(found) == 2:
            break
    assert len(found) == 2
    assert all(actual != allowed for actual, allowed in found)
