"""rollback: after any history of a session, its logits are those of a fresh pass over the tokens that are kept.

A state machine opens, appends (ragged blocks, nothing for some rows), rolls back, selects (rows end, change places, are
duplicated) and compacts, on one model of each kind of KV cache in transformers. After each block the logits are held
against a recompute without a cache. Kinds that can't be rolled back must be refused before anything runs.

Faults that it must catch: a rollback that is one short or one long, positions that are not rolled back, a slot of the
mask left visible, a compaction that forgets one layer, a selection that forgets the mask or the layers, holes under
attention that counts slots.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from properties.kinds import ACCEPTED, REFUSED, VOCAB_SIZE, AcceptedKind, RefusedKind, shell, tiny_model
from specverify.errors import UnsupportedModel
from specverify.models import transformers as sessions
from specverify.models.kv_cache import MaskedCache, require_rollback

if TYPE_CHECKING:
    from specverify.models.transformers import TransformersSession
    from specverify.models.tree_block import TreeBlock

MAX_ROWS, MAX_TOKENS, STEPS = 4, 24, 12

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=MAX_ROWS).filter(any)
"""Tokens for row 0, row 1, ...; rows past the end get none."""


class Histories(RuleBasedStateMachine):
    """A session beside the plain lists of tokens that it should hold."""

    kind: ClassVar[AcceptedKind]
    rows: list[list[int]]
    spoken: int
    session: TransformersSession

    @initialize(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=MAX_ROWS))
    def open(self, lengths: list[int]) -> None:
        """Prefill prompts of these lengths."""
        self.spoken = 0
        self.rows = [self._fresh(length) for length in lengths]
        self.session = tiny_model(self.kind.model_type).open(self.rows)

    @rule(counts=COUNTS)
    def append(self, counts: list[int]) -> None:
        """A ragged block, right-padded with what must never be read."""
        room = [MAX_TOKENS - len(row) for row in self.rows]
        blocks = [self._fresh(min(count, most)) for count, most in zip(self._one_a_row(counts), room, strict=True)]
        width = max(map(len, blocks))
        padded = torch.tensor([block + [10**6] * (width - len(block)) for block in blocks], dtype=torch.int64)
        logits = self.session.append(padded.view(len(blocks), width), torch.tensor([len(block) for block in blocks]))
        self.rows = [row + block for row, block in zip(self.rows, blocks, strict=True)]
        self._are_those_of_a_fresh_pass(logits, [len(block) for block in blocks])

    @rule(drops=COUNTS)
    def rollback(self, drops: list[int]) -> None:
        """Row b loses its last `drops[b]` tokens, or all that it has."""
        dropped = zip(self.rows, self._one_a_row(drops), strict=True)
        self.rows = [row[: max(0, len(row) - count)] for row, count in dropped]
        self.session.rollback(torch.tensor([len(row) for row in self.rows]))

    @rule(kept=st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS))
    def select(self, kept: list[int]) -> None:
        """Rows end, change places, or are duplicated."""
        kept = [place % len(self.rows) for place in kept]
        self.rows = [list(self.rows[place]) for place in kept]
        self.session.select(torch.tensor(kept, dtype=torch.int64))

    @rule()
    def compact(self) -> None:
        """What happens by itself where holes are many, forced here so that short histories reach it."""
        self.session._cache.compact()  # noqa: SLF001 - the property is about the cache inside

    def teardown(self) -> None:
        """Every token once more: a trace that no block has shown is shown by one last token a row."""
        if getattr(self, "rows", None) and max(map(len, self.rows)) < MAX_TOKENS:
            self.append([1] * len(self.rows))

    def _fresh(self, count: int) -> list[int]:
        """The next tokens of a fixed sequence: which ones matters little, so that only their number is drawn."""
        self.spoken += count
        return [token * token % 11 % VOCAB_SIZE for token in range(self.spoken - count, self.spoken)]

    def _one_a_row(self, counts: list[int]) -> list[int]:
        return [*counts, *[0] * len(self.rows)][: len(self.rows)]

    def _are_those_of_a_fresh_pass(self, logits: torch.Tensor, added: list[int]) -> None:
        assert self.session.lengths.tolist() == [len(row) for row in self.rows]
        fresh = tiny_model(self.kind.model_type).logits(self.rows)
        for index, (row, count) in enumerate(zip(self.rows, added, strict=True)):
            if not count:
                continue
            difference = (logits[index, :count] - fresh[index, len(row) - count : len(row)]).abs().amax(-1)
            place = int((difference > self.kind.allowed).long().argmax())
            assert float(difference[place]) <= self.kind.allowed, (
                f"{self.kind}: row {index} holds {row}; after its token {len(row) - count + place} a logit is off by "
                f"{float(difference[place]):.2g} (allowed {self.kind.allowed:.0e})"
            )


def machine(kind: AcceptedKind) -> type[Histories]:
    """The machine on one model."""
    return type(f"Histories_{kind}", (Histories,), {"kind": kind})


@pytest.mark.parametrize("kind", ACCEPTED.values(), ids=str)
def test_logits_after_any_history_are_those_of_a_fresh_pass(kind: AcceptedKind) -> None:
    """A quarter of the profile's examples, because each has up to a dozen steps."""
    examples = settings.default.max_examples // 4
    run_state_machine_as_test(machine(kind), settings=settings(max_examples=examples, stateful_step_count=STEPS))


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_what_cant_be_rolled_back_is_refused(refused: RefusedKind) -> None:
    """Before anything runs, in one sentence that names the architecture and the reason."""
    module = shell(refused)
    with pytest.raises(UnsupportedModel, match=refused.reason) as caught:
        require_rollback(module)
    assert type(module).__name__ in str(caught.value)


def test_each_kind_of_layer_in_transformers_is_tried_or_refused() -> None:
    """A kind that a later release adds is refused until somebody adds a model for it here."""
    tried = {layer_type for kind in ACCEPTED.values() for layer_type in kind.layer_types}
    accepted = {layer_type for layer_type in DYNAMIC_LAYER_TYPE_MAPPING if _accepts(layer_type)}
    assert accepted <= tried


def _accepts(layer_type: str) -> bool:
    module = tiny_model("llama").module
    config = module.config
    before = getattr(config, "layer_types", None)
    try:
        config.layer_types, config.sliding_window, config.attention_chunk_size = [layer_type] * 2, 3, 3
        require_rollback(module)
    except UnsupportedModel:
        return False
    finally:
        config.layer_types = before
        del config.sliding_window, config.attention_chunk_size
    return True


# ------------------------------------------------------------------------------------------------ planted faults


class OneShort(MaskedCache):
    """A rollback hides one token too many."""

    extra = -1

    def rollback(self, lengths: np.ndarray) -> None:
        """The lengths that are reported are right."""
        held = self.lengths
        moved = np.where(lengths < held, np.clip(lengths + self.extra, 0, held), lengths)
        super().rollback(moved)
        self.lengths = lengths.copy()


class OneLong(OneShort):
    """A rollback leaves one dropped token visible."""

    extra = 1


class StalePositions(MaskedCache):
    """Position ids go on from the longest that a row ever was."""

    longest = 0

    def arguments(self, num_tokens: np.ndarray, block: int, tree: TreeBlock | None = None) -> dict[str, object]:
        """Everything else is right."""
        arguments = super().arguments(num_tokens, block, tree)
        self.longest = max(self.longest, int(self.lengths.max(initial=0)))
        if "position_ids" in arguments:
            arguments["position_ids"] = arguments["position_ids"] + self.longest - int(self.lengths.max(initial=0))
        return arguments


class PaddingVisible(MaskedCache):
    """The last slot of a ragged block stays visible for rows that did not use it."""

    def append(self, num_tokens: np.ndarray, block: int, tree: TreeBlock | None = None) -> None:
        """The lengths are right."""
        super().append(num_tokens, block, tree)
        self.mask[:, -1] = True


class LayerNotCompacted(MaskedCache):
    """The first layer keeps its slots where they were."""

    def compact(self) -> None:
        """The width is right."""
        layers = self._layers
        self._layers = layers[1:]
        super().compact()
        self._layers = layers
        for layer in layers[:1]:
            layer.truncate(self.num_slots)


class MaskNotSelected(MaskedCache):
    """Keys and values change places, the mask does not."""

    def select(self, rows: np.ndarray) -> None:
        """The lengths are right."""
        mask = self.mask
        super().select(rows)
        self.mask = mask[np.arange(len(rows)) % max(1, len(mask)), : self.num_slots]


class LayersNotSelected(MaskedCache):
    """The mask changes places, keys and values do not."""

    def select(self, rows: np.ndarray) -> None:
        """The first rows stay."""
        for layer in self._layers:
            layer.select_rows(torch.arange(len(rows)) % len(self.mask))
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]


class HolesUnderAWindow(MaskedCache):
    """Nothing is brought to left padding, though the window counts slots."""

    def _compaction_due(self) -> bool:
        """Never."""
        return False


FAULTS: tuple[tuple[str, type[MaskedCache]], ...] = (
    ("llama", OneShort),
    ("llama", OneLong),
    ("llama", StalePositions),
    ("gpt2", StalePositions),
    ("llama", PaddingVisible),
    ("llama", LayerNotCompacted),
    ("llama", MaskNotSelected),
    ("llama", LayersNotSelected),
    ("mistral", OneLong),
    ("mistral", HolesUnderAWindow),
    ("gemma3_text", HolesUnderAWindow),
    ("llama4_text", HolesUnderAWindow),
    ("gemma4_text", HolesUnderAWindow),
    ("gpt_neo", HolesUnderAWindow),
)


_WITHOUT_EXPLANATION = (Phase.generate, Phase.shrink)
_SEARCH = settings(
    max_examples=300,
    stateful_step_count=STEPS,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,  # the last append of a history fails where an earlier one did
)


@pytest.mark.parametrize(("model_type", "fault"), FAULTS, ids=[f"{one}-{fault.__name__}" for one, fault in FAULTS])
def test_property_fails_on_its_faults(
    monkeypatch: pytest.MonkeyPatch, model_type: str, fault: type[MaskedCache]
) -> None:
    """Within a few hundred histories; not shrunk, that takes longer."""
    monkeypatch.setattr(sessions, "MaskedCache", fault)
    with pytest.raises(AssertionError, match="a logit is off by"):
        run_state_machine_as_test(machine(ACCEPTED[model_type]), settings=settings(_SEARCH, phases=[Phase.generate]))


def test_a_failing_history_shrinks_to_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has to read it: two rows, a rollback, a token or two, as calls that can be replayed."""
    monkeypatch.setattr(sessions, "MaskedCache", OneLong)
    with pytest.raises(AssertionError, match=r"llama: row . holds .*; after its token . a logit is off by") as caught:
        run_state_machine_as_test(machine(ACCEPTED["llama"]), settings=settings(_SEARCH, phases=_WITHOUT_EXPLANATION))
    history = "\n".join(caught.value.__notes__)
    calls = re.findall(r"state\.(\w+)\((.*)\)", history)
    assert calls[0][0] == "open"
    assert "rollback" in dict(calls)
    assert len(calls) <= 5, history
    assert sum(map(int, re.findall(r"\d", "".join(given for _, given in calls)))) <= 8, history
