"""conformance: every claim of `specverify qualify`, one test each, on our rules or on the one of `--specverify-rule`."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

from properties.conftest import HERE, pytest_collection_modifyitems
from specverify.decoding import Decoder
from specverify.drafting import NoDraft
from specverify.errors import ClaimViolated
from specverify.faults import find_fault
from specverify.models.table import random_table
from specverify.qualify import Qualification, load_rule, qualify
from specverify.qualify.claims import CLAIMS, Exact
from specverify.qualify.laws import subject
from specverify.qualify.text import failure
from specverify.records import Verdict

BY_ID = {claim.id: claim for claim in CLAIMS}


@cache
def found(rule: str, shape: str | None, seed: int) -> Qualification:
    """All claims at once: they read the same laws."""
    return qualify(load_rule(rule), name=rule, shape=shape, seed=seed)


@pytest.mark.parametrize("claim_id", BY_ID)
def test_claim_holds(claim_id: str, qualified_rule: str, pytestconfig: pytest.Config) -> None:
    """With the smallest example where it doesn't."""
    shape, seed = (pytestconfig.getoption(f"--specverify-{name}") for name in ("shape", "seed"))
    seed = seed or 0
    (result,) = (each for each in found(qualified_rule, shape, seed).claims if each.id == claim_id)
    if result.verdict is Verdict.NOT_RUN:
        pytest.skip(result.summary)
    if result.verdict is not Verdict.PASS:
        raise ClaimViolated(failure(result, reproduce=f"specverify qualify --rule {qualified_rule} --seed {seed}"))


WRONG = "tests.unit.qualify.verifiers:"
FAULTS = [
    ("answers", WRONG + "empty_residual"),
    ("streams", "draft-noise-in-accept"),
    ("streams", "draft-noise-in-residual"),
    ("streams", "accept-noise-in-residual"),
    ("streams", WRONG + "reused_uniform"),
    ("acceptance", "ratio-inflated"),
    ("acceptance", "ratio-square-root"),
    ("acceptance", "always-accept"),
    ("acceptance", WRONG + "half_ratio"),
    ("residual", "residual-from-target"),
    ("residual", "residual-wrong-row"),
    ("residual", "residual-not-clamped"),
    ("residual", WRONG + "residual_from_wrong_row"),
    ("bonus", "bonus-from-draft"),
    ("support", "accept-or-equal"),
    ("lossless", "greedy-verification"),
    ("point-masses", WRONG + "none_means_uniform"),
    ("equal-laws", WRONG + "shortcut_when_equal"),
    ("rows", WRONG + "vllm_style_neighbours"),
    ("ragged", WRONG + "fewer_drafts"),
    ("dtype", WRONG + "tolerant_ratio"),
    ("deterministic", WRONG + "seed_ignored"),
]


@pytest.mark.parametrize(("claim_id", "fault"), FAULTS)
def test_claim_fails_on_its_fault(claim_id: str, fault: str) -> None:
    """A claim that can't fail says nothing."""
    if ":" in fault:
        function = load_rule(fault)
    else:
        bare = Decoder(target=random_table(3, 1, seed=0), drafter=NoDraft(3))
        function = find_fault(fault).apply(bare).rule
    result = BY_ID[claim_id].result(Exact(subject(fault, function)))
    assert result.verdict is Verdict.FAIL, result.summary


def test_every_claim_has_a_fault() -> None:
    """None is left out of the list above."""
    assert {claim_id for claim_id, _ in FAULTS} == set(BY_ID)


@pytest.mark.parametrize(
    ("given", "kept"), [("--specverify-rule", "claim"), ("--specverify-engine", "cell"), ("", None)]
)
def test_somebody_elses_is_all_that_is_looked_at(given: str, kept: str | None) -> None:
    """`pytest properties --specverify-rule m:f` holds nothing else of this folder; other folders keep their tests."""
    items = [
        SimpleNamespace(name=name, path=folder / "test.py", fixturenames=arguments)
        for name, folder, arguments in (
            ("claim", HERE, ["claim_id", "qualified_rule"]),
            ("cell", HERE, ["cell_id"]),
            ("ours", HERE, []),
            ("elsewhere", HERE.parent, []),
        )
    ]
    left_out: list[object] = []

    def deselected(*, items: list[object]) -> None:
        left_out.extend(items)

    hook = SimpleNamespace(pytest_deselected=deselected)
    config = SimpleNamespace(getoption=lambda option: option == given, hook=hook)
    everything = list(items)
    pytest_collection_modifyitems(config, items)
    assert [item.name for item in items if item.path.parent == HERE] == ([kept] if kept else ["claim", "cell", "ours"])
    assert items[-1].name == "elsewhere"
    assert [each for each in everything if each not in items] == left_out
