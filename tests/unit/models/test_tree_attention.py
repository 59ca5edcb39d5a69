"""Trees in a session: each entry's logits, and all that come later, are those of a fresh pass without a cache."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specverify.errors import InternalError, PromptError, UnsupportedModel
from specverify.models.kv_cache import MaskedCache, require_tree_attention
from specverify.models.table import TableModel, random_table
from specverify.models.transformers import TransformersModel, require_working_trees
from specverify.models.tree_block import TreeBlock
from specverify.pairs import embedded
from tests.unit.models.checkpoints import VOCAB_SIZE, random_module
from tests.unit.models.histories import append

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.25}
FULL_ATTENTION = ("gpt2", "llama", "qwen3")
SEEDS = range(4)
RUBBISH = 10**6
"""Whatever stands after a row's entries is never read."""


def tree_model(architecture: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> TransformersModel:
    """A tiny model that takes trees."""
    module = random_module(architecture).to(dtype)
    module.set_attn_implementation(attention)
    return TransformersModel(module, architecture)


def random_parents(chance: random.Random, size: int) -> list[int]:
    """Any forest: a root may come late, a node may have many children."""
    return [chance.randint(-1, place - 1) for place in range(size)]


def path_to(parents: list[int], place: int) -> list[int]:
    """From the root to the place, literally."""
    path = [place]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def append_tree(model: TransformersModel, session: object, rows: list[list[int]], chance: random.Random) -> float:
    """Append a random ragged tree, keep a random path of each row; the greatest difference of an entry's logits."""
    block = chance.choice([1, 4, 9])
    sizes = [chance.randint(0, block) for _ in rows]
    parents = [random_parents(chance, size) for size in sizes]
    ids = [[chance.randrange(model.vocab_size) for _ in range(size)] for size in sizes]
    padded = [torch.tensor([[*one, *[RUBBISH] * (block - len(one))] for one in each]) for each in (ids, parents)]
    before = session.lengths
    logits = session.append(padded[0], torch.tensor(sizes), padded[1])
    assert torch.equal(session.lengths, before)
    worst = 0.0
    for row, size in enumerate(sizes):
        prefixes = [rows[row] + [ids[row][at] for at in path_to(parents[row], place)] for place in range(size)]
        for place, prefix in enumerate(prefixes):
            expected = model.logits([prefix])[0, -1]
            worst = max(worst, float((logits[row, place] - expected).abs().max()))
    kept = [path_to(own, chance.randrange(len(own))) if own and chance.random() < 0.8 else [] for own in parents]
    kept = [path[: chance.randint(0, len(path))] for path in kept]
    session.keep(torch.tensor([path + [-1] * (block - len(path)) for path in kept]), torch.tensor([*map(len, kept)]))
    rows[:] = [row + [own[at] for at in path] for row, own, path in zip(rows, ids, kept, strict=True)]
    return worst


def worst_difference(model: TransformersModel | TableModel, *, seed: int, steps: int = 16) -> float:
    """Replay a random history of trees, blocks, rollbacks and selections; the greatest difference seen in it."""
    chance = random.Random(seed)
    rows = [[chance.randrange(model.vocab_size) for _ in range(chance.choice([0, 1, 6]))] for _ in range(3)]
    session = model.open(rows)
    worst = 0.0
    for _ in range(steps):
        action = chance.choice(["tree", "tree", "append", "rollback", "select"])
        if action == "tree":
            worst = max(worst, append_tree(model, session, rows, chance))
        elif action == "append":
            worst = max(worst, append(model, session, rows, chance))
        elif action == "rollback":
            rows[:] = [row[: max(0, len(row) - chance.randint(0, 4))] for row in rows]
            session.rollback(torch.tensor([len(row) for row in rows]))
        else:
            kept = [chance.randrange(len(rows)) for _ in range(chance.choice([1, 2, 4]))]
            rows[:] = [rows[index] for index in kept]
            session.select(torch.tensor(kept))
        assert session.lengths.tolist() == [len(row) for row in rows]
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_tree_logits_equal_a_recompute_after_any_history(architecture: str, attention: str) -> None:
    """Entries of ragged trees, and whatever is appended after one of their paths was kept."""
    model = tree_model(architecture, attention)
    assert max(worst_difference(model, seed=seed) for seed in SEEDS) < ALLOWED[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tree_logits_equal_a_recompute_in_other_dtypes(dtype: torch.dtype) -> None:
    """The difference is that of the dtype's rounding: the mask has a least number of its own in each."""
    assert worst_difference(tree_model("llama", dtype=dtype), seed=1) < ALLOWED[dtype]


def _one_position_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TreeBlock, "height", property(lambda self: np.minimum(self.depths.max(axis=1, initial=-1) + 1, 1))
    )


def _positions_in_order_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    init = TreeBlock.__init__

    def shifted(self: TreeBlock, *arguments: object) -> None:
        init(self, *arguments)
        self.depths = np.where(self.depths >= 0, np.arange(self.depths.shape[1]), -1)

    monkeypatch.setattr(TreeBlock, "__init__", shifted)
    monkeypatch.setattr(TreeBlock, "path", _trusting_path)


def _trusting_path(self: TreeBlock, places: np.ndarray, num_kept: np.ndarray) -> np.ndarray:
    kept = np.zeros(self.depths.shape, dtype=bool)
    for row, (own, count) in enumerate(zip(places, num_kept, strict=True)):
        kept[row, own[:count]] = True
    return kept


def _siblings_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    init = TreeBlock.__init__

    def causal(self: TreeBlock, *arguments: object) -> None:
        init(self, *arguments)
        self.sees = np.broadcast_to(np.tri(self.sees.shape[1], dtype=bool), self.sees.shape)

    monkeypatch.setattr(TreeBlock, "__init__", causal)
    monkeypatch.setattr(TreeBlock, "path", _trusting_path)


def _keep_the_first_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: TreeBlock, places: np.ndarray, num_kept: np.ndarray) -> np.ndarray:
        return np.arange(self.depths.shape[1]) < num_kept[:, None]

    monkeypatch.setattr(TreeBlock, "path", first)


@pytest.mark.parametrize(
    "bug", [_one_position_for_all, _positions_in_order_of_places, _siblings_see_each_other, _keep_the_first_entries]
)
def test_a_planted_bug_in_a_tree_is_seen_by_the_same_comparison(monkeypatch: pytest.MonkeyPatch, bug: object) -> None:
    """Positions, the mask and the selection are each needed."""
    model = tree_model("llama")
    bug(monkeypatch)
    assert any(worst_difference(model, seed=seed) > 100 * ALLOWED[torch.float32] for seed in SEEDS)
    if bug is not _one_position_for_all:  # the probe's rows are short of the positions that this bug clips
        with pytest.raises(UnsupportedModel, match="llama gives other logits in a tree of drafts than without a cache"):
            require_working_trees(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_trees_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, role: str, dtype: torch.dtype) -> None:
    """The embedded models pass, in half precision too; with siblings that see each other they don't."""
    model = TransformersModel(AutoModelForCausalLM.from_pretrained(getattr(embedded(), role), dtype=dtype), role)
    require_working_trees(model)
    _siblings_see_each_other(monkeypatch)
    with pytest.raises(UnsupportedModel, match=f"{role} gives other logits in a tree of drafts"):
        require_working_trees(model)


def test_a_tables_tree_is_its_prefixes() -> None:
    """The table's own session, by the same histories: it is what the exact laws stand on."""
    table = random_table(2, 16, seed=3)
    rows = [[0], [1, 1]]
    session = table.open(rows)
    chance = random.Random(2)
    for _ in range(4):
        assert append_tree(table, session, rows, chance) == 0
        rows = [row[:3] for row in rows]
        session.rollback(torch.tensor([len(row) for row in rows]))
        assert session.lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("model", [random_table(3, 5, seed=1), tree_model("llama")], ids=["table", "llama"])
def test_a_tree_is_closed_before_anything_else_is_asked(model: TransformersModel | TableModel) -> None:
    """An open tree has no path yet, and what is kept must be one; a caller that is wrong about it has lost count."""
    session = model.open([[1, 2], [0]])
    with pytest.raises(InternalError, match="no tree is open"):
        session.keep(torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    block, sizes = torch.tensor([[1, 2, 1], [0, 2, 2]]), torch.tensor([3, 2])
    session.append(block, sizes, torch.tensor([[-1, 0, 0], [-1, -1, -1]]))
    for asked in (
        lambda: session.append(block, sizes),
        lambda: session.rollback(torch.tensor([1, 1])),
        lambda: session.select(torch.tensor([0])),
    ):
        with pytest.raises(InternalError, match="a tree is open"):
            asked()
    with pytest.raises(InternalError, match="no path"):
        session.keep(torch.tensor([[1, 2], [0, 0]]), torch.tensor([2, 1]))
    session.keep(torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1]))
    assert session.lengths.tolist() == [4, 2]


def test_a_path_that_skips_or_leaves_the_tree_is_refused() -> None:
    """A parent left out, an order turned round, an entry that the row does not have."""
    tree = TreeBlock(torch.tensor([[-1, 0, 1, 0]]), np.array([3]))
    for places, count in (([0, 2], 2), ([1], 1), ([1, 0], 2), ([3], 1), ([0, 3], 2)):
        with pytest.raises(InternalError, match="no path from a root"):
            tree.path(np.array([places]), np.array([count]))
    assert tree.path(np.array([[0, 1, 2]]), np.array([3])).tolist() == [[True, True, True, False]]
    with pytest.raises(InternalError, match="a parent must stand before its children"):
        TreeBlock(torch.tensor([[-1, 2, 1, 0]]), np.array([3]))


def test_depth_counts_against_the_positions_and_nodes_do_not() -> None:
    """Ten siblings stand on one position; a path past the last is refused with the row that would hold it."""
    model = tree_model("gpt2")
    session = model.open([[1] * 254, [2]])
    block, sizes = torch.full((2, 10), 3), torch.tensor([10, 0])
    session.append(block, sizes, torch.tensor([[-1] + [0] * 9, [-1] * 10]))
    session.keep(torch.tensor([[0, 9], [0, 0]]), torch.tensor([2, 0]))
    assert session.lengths.tolist() == [256, 1]
    with pytest.raises(PromptError, match="row 0 would hold 257"):
        session.append(torch.tensor([[1], [1]]), torch.tensor([1, 1]), torch.tensor([[-1], [-1]]))
    logits = session.append(torch.tensor([[1], [1]]), torch.tensor([0, 1]), torch.tensor([[-1], [-1]]))
    assert float((logits[1, 0] - model.logits([[2, 1]])[0, -1]).abs().max()) < ALLOWED[torch.float32]


def test_keeping_a_path_moves_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that were not kept leave the mask; the layers stay as they are."""
    model = tree_model("llama")
    session = model.open([[1, 2], [3]])
    monkeypatch.setattr(MaskedCache, "compact", lambda _: pytest.fail("the cache was copied"))
    session.append(torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([3, 3]), torch.tensor([[-1, 0, 0], [-1, 0, 1]]))
    keys = session._cache._layers[0].keys.data_ptr()
    session.keep(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 2]))
    assert session._cache.mask.tolist() == [[True, True, True, False, True], [True, False, True, True, False]]
    assert session._cache._layers[0].keys.data_ptr() == keys


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3"])
def test_a_model_that_counts_slots_refuses_a_tree(architecture: str) -> None:
    """A window over slots would count siblings; the sentence says what to use, and chains still work."""
    session = TransformersModel(random_module(architecture), architecture).open([[1, 2]])
    one = torch.tensor([[3]])
    with pytest.raises(
        UnsupportedModel, match="can't verify a tree of drafts; use a rule over a chain, such as --rule"
    ):
        session.append(one, torch.tensor([1]), torch.tensor([[-1]]))
    assert session.append(one, torch.tensor([1])).shape == (1, 1, VOCAB_SIZE)


def test_alibi_and_attention_without_masks_refuse_a_tree() -> None:
    """Before anything runs, from the configuration alone."""
    with torch.device("meta"):
        bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", n_layer=1))
    with pytest.raises(UnsupportedModel, match="attends by the distance of two slots"):
        require_tree_attention(bloom)
    module = random_module("llama")
    require_tree_attention(module)
    module.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match=r"flash_attention_2 attention, which takes no mask.*sdpa"):
        require_tree_attention(module)
