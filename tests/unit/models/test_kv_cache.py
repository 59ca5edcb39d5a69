"""The KV cache: after any history of append, rollback and select, logits are those of a fresh pass."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specverify.errors import InternalError, UnsupportedModel
from specverify.models import kv_cache
from specverify.models.kv_cache import MaskedCache, cache_argument, counts_slots, require_rollback, too_many_holes
from specverify.models.transformers import TransformersModel
from tests.unit.models.checkpoints import random_module
from tests.unit.models.histories import ALLOWED, append, difference, worst_difference

SEEDS = range(3)


def test_cached_logits_equal_a_recompute_after_any_history(model: TransformersModel) -> None:
    """Ragged appends, rollbacks, reorders and duplicates leave no trace in the logits."""
    worst = max(worst_difference(model, seed=seed) for seed in SEEDS)
    assert worst < ALLOWED[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cached_logits_equal_a_recompute_in_other_dtypes(dtype: torch.dtype) -> None:
    """The difference is that of the dtype's rounding; logits come in the model's own dtype."""
    model = TransformersModel(random_module("llama").to(dtype), "llama")
    assert model.logits([[1, 2]]).dtype is dtype
    assert max(worst_difference(model, seed=seed) for seed in SEEDS) < ALLOWED[dtype]


def _forget_the_mask_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedCache, "rollback", lambda self, lengths: setattr(self, "lengths", lengths.copy()))


def _positions_from_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "takes_position_ids", lambda _: False)
    monkeypatch.setattr(kv_cache, "counts_slots", lambda _: False)


def _select_the_mask_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(self: MaskedCache, rows: np.ndarray) -> None:
        for layer in self._cache.layers:
            layer.select_rows(torch.arange(len(rows)).clamp(max=len(self.mask) - 1))
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]

    monkeypatch.setattr(MaskedCache, "select", select)


@pytest.mark.parametrize("bug", [_forget_the_mask_edit, _positions_from_slots, _select_the_mask_only])
def test_a_planted_bug_is_seen_by_the_same_comparison(monkeypatch: pytest.MonkeyPatch, bug: object) -> None:
    """The comparison that passes above fails by orders of magnitude when one line of the cache is wrong."""
    model = TransformersModel(random_module("llama"), "llama")
    bug(monkeypatch)
    assert any(worst_difference(model, seed=seed) > 1000 * ALLOWED[torch.float32] for seed in SEEDS)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3"])
def test_holes_under_a_sliding_window_are_seen_by_the_same_comparison(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """The window counts slots: without left padding before each append, the comparison fails."""
    module = random_module(architecture)
    assert counts_slots(module)
    monkeypatch.setattr(kv_cache, "counts_slots", lambda _: False)
    model = TransformersModel(module, architecture)
    assert any(worst_difference(model, seed=seed) > 1000 * ALLOWED[torch.float32] for seed in SEEDS)


def test_a_rollback_brings_tokens_back_that_left_the_window() -> None:
    """Sliding layers keep all keys: after a rollback by more than the window, the older tokens are there again."""
    model = TransformersModel(random_module("mistral"), "mistral")
    row = list(range(1, 25))
    session = model.open([row])
    session.rollback(torch.tensor([10]))
    logits = session.append(torch.tensor([[3, 4]]), torch.tensor([2]))
    assert difference(model, logits, [[*row[:10], 3, 4]], [2]) < ALLOWED[torch.float32]


def test_rejected_tokens_never_show_again(model: TransformersModel) -> None:
    """Two sessions that differ in their rejected drafts only give the same logits for ever after."""
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6]]
    later = []
    for rejected in (7, 8):
        session = model.open(prompts)
        session.append(torch.full((3, 4), rejected), torch.tensor([4, 2, 3]))
        session.rollback(torch.tensor([5, 2, 1]))
        later.append(session.append(torch.tensor([[10, 11], [12, 13], [14, 15]]), torch.tensor([2, 2, 2])))
    torch.testing.assert_close(later[0], later[1], rtol=0, atol=ALLOWED[torch.float32])


def test_a_single_row_never_has_holes(llama: TransformersModel) -> None:
    """With one row a rollback drops the tail, so the model runs on its own defaults, without a mask."""
    session = llama.open([[1, 2, 3]])
    for _ in range(5):
        session.append(torch.tensor([[4, 5, 6, 7]]), torch.tensor([4]))
        session.rollback(session.lengths - 3)
    assert session._cache.num_slots == 8
    assert set(session._cache.arguments(np.array([1]), 1)) == {cache_argument(llama.module), "use_cache"}


def test_compaction_bounds_the_holes_and_changes_no_logit(llama: TransformersModel) -> None:
    """Rows that reject in turn would double the slots; the named rule bounds them, and logits stay right."""
    session = llama.open([[1], [2]])
    rows = [[1], [2]]
    chance = random.Random(5)
    worst, most = 0.0, 0
    for step in range(60):
        worst = max(worst, append(llama, session, rows, chance) if step % 10 == 9 else 0.0)
        added = torch.tensor([[3, 4, 5], [6, 7, 8]])
        session.append(added, torch.tensor([3, 3]))
        loser = step % 2
        session.rollback(session.lengths - torch.tensor([3 * (loser == 0), 3 * (loser == 1)]))
        rows[1 - loser] += added[1 - loser].tolist()
        longest = max(map(len, rows))
        assert not too_many_holes(session._cache.num_slots - 8, longest)
        most = max(most, session._cache.num_slots)
        if longest > 40:
            session.rollback(torch.tensor([4, 4]))
            rows = [row[:4] for row in rows]
    assert worst < ALLOWED[torch.float32]
    assert most > 60


def test_rollback_beyond_what_a_row_holds_is_an_internal_error(llama: TransformersModel) -> None:
    """A caller that keeps more than there is has lost count; nothing is guessed."""
    session = llama.open([[1, 2], [3]])
    with pytest.raises(InternalError, match=r"rollback to \[2, 2\] tokens, but the rows hold \[2, 1\]"):
        session.rollback(torch.tensor([2, 2]))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("qwen3_next", r"recurrent state \(linear_attention layers\)"),
        ("rwkv", "recurrent state"),
        ("recurrent_gemma", "recurrent state"),
        ("minimax", "cache layer"),
        ("lfm2", "LinearAttentionLayer"),
        ("xlnet", "no KV cache"),
        ("bart", "no position ids"),
        ("roberta", "counts positions from its padding id"),
    ],
)
def test_a_state_that_cant_be_rolled_back_is_refused_before_anything_runs(model_type: str, reason: str) -> None:
    """The sentence names the architecture, the reason, and what to use instead."""
    options = {"roberta": {"is_decoder": True}, "lfm2": {"layer_types": ["conv"] * 16 + ["full_attention"] * 16}}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options.get(model_type, {})))
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        require_rollback(module)
    assert type(module).__name__ in str(caught.value)
    assert "use a decoder-only attention model" in str(caught.value)


def test_a_model_that_attends_in_both_directions_is_refused() -> None:
    """BERT as it is published is no causal language model, though `AutoModelForCausalLM` loads it."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", num_hidden_layers=1))
    with pytest.raises(UnsupportedModel, match="attends in both directions"):
        require_rollback(module)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt_neox_japanese"])
def test_a_causal_model_that_leaves_is_decoder_unset_is_accepted(model_type: str) -> None:
    """GPT-NeoX and Pythia have the field in their configuration and never read it."""
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    config = AutoConfig.for_model(model_type, **sizes, num_hidden_layers=2, num_attention_heads=2)
    assert config.is_decoder is False
    model = TransformersModel(AutoModelForCausalLM.from_config(config), model_type)
    assert worst_difference(model, seed=0) < ALLOWED[torch.float32]


def test_holes_are_allowed_only_where_they_do_no_harm() -> None:
    """Full attention with position ids; a window, ALiBi, or code that we haven't read gets left padding."""
    assert not counts_slots(random_module("llama"))
    assert not counts_slots(random_module("gpt2"))
    assert counts_slots(random_module("mistral"))
    with torch.device("meta"):
        bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", n_layer=1))
    assert counts_slots(bloom)
    foreign = type(
        "ForeignForCausalLM", (type(random_module("llama")),), {"__module__": "transformers_modules.foreign"}
    )
    assert counts_slots(foreign(random_module("llama").config))
