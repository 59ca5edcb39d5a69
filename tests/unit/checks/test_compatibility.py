"""compatibility names every way in which two tokenizers can disagree, and fails only on what can change a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from specverify.checks.compatibility import compare_ids, compatibility, eos_ids
from specverify.models.loading import LoadedModel, Pair
from specverify.plan import Plan
from specverify.records import Verdict
from specverify.scoring import ScoredTraces
from specverify.subject import EncodedPrompt, Subject

if TYPE_CHECKING:
    from collections.abc import Callable

    from specverify.records import CheckResult, Finding

VOCAB_SIZE = 300
_SPECIAL = ["<|eos|>", "<|pad|>", "<|bos|>", "<|reserved_special_token_0|>"]
_TEXT = (
    ["the cat sat on the mat, and the dog sat on the log"] * 20
    + ["that is the other one; it is not there"] * 20
    + ["quick brown foxes jump over lazy wolves"] * 20
)


@dataclass(frozen=True)
class FakeModel:
    """What the check reads of a model."""

    vocab_size: int = VOCAB_SIZE
    num_embeddings: int = VOCAB_SIZE
    max_length: int = 512
    num_parameters: int = 1000
    name: str = "fake"


@dataclass
class Files:
    """A tokenizer's JSON and what stands beside it: change it, then load it."""

    tokenizer: dict[str, Any]
    roles: dict[str, str] = field(default_factory=lambda: {"eos_token": "<|eos|>", "pad_token": "<|pad|>"})
    template: str | None = "{{ messages[0].content }}"
    eos: int | list[int] | None = 0
    model: FakeModel = field(default_factory=FakeModel)

    def load(self) -> LoadedModel:
        """As the loader would give it."""
        core = Tokenizer.from_str(json.dumps(self.tokenizer))
        fast = PreTrainedTokenizerFast(tokenizer_object=core, **self.roles)
        fast.chat_template = self.template
        generation = GenerationConfig(eos_token_id=self.eos)
        return LoadedModel(self.model, fast, None, generation, "folder")

    def add(self, token: str) -> None:
        """A special token after the last id."""
        added = self.tokenizer["added_tokens"]
        added.append({**added[0], "id": VOCAB_SIZE, "content": token})

    def swap(self, one: int, other: int) -> tuple[str, str]:
        """Let two ids change places; their tokens."""
        vocabulary = self.tokenizer["model"]["vocab"]
        names = {number: token for token, number in vocabulary.items()}
        vocabulary[names[one]], vocabulary[names[other]] = other, one
        return names[one], names[other]


@pytest.fixture(scope="module")
def trained() -> str:
    """A really trained byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return str(tokenizer.to_str())


@pytest.fixture
def files(trained: str) -> Callable[[], Files]:
    """A fresh copy for each model."""
    return lambda: Files(json.loads(trained))


def certified(target: LoadedModel, draft: LoadedModel | None, plan: Plan | None = None) -> CheckResult:
    """The check's answer about a pair."""
    prompt = EncodedPrompt(id="p", domain="d", token_ids=tuple(range(10)))
    pair = Pair(target, draft)
    subject = Subject(engine=None, target=None, draft=None, prompts=(prompt,), pair=pair)
    return compatibility.conclude(subject, plan or Plan(), ScoredTraces())


def found(result: CheckResult, place: str) -> Finding:
    """The one finding at a place."""
    (finding,) = [finding for finding in result.findings if finding.place == place]
    return finding


def test_equal_tokenizers_pass_without_a_word(files: Callable[[], Files]) -> None:
    """Nothing differs, so nothing is reported; every id was compared."""
    draft = files()
    draft.model = FakeModel(num_parameters=100)
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert result.findings == ()
    assert result.num_samples == VOCAB_SIZE
    assert result.measurements["num_differing_ids"] == 0
    assert {series.y for series in result.plots[0].series} == {(0.0, 0.0)}
    assert "--only compatibility" in result.reproduce


def test_asks_nothing() -> None:
    """No engine is needed."""
    subject = Subject(engine=None, target=None, draft=None, prompts=())
    assert list(compatibility.rounds(subject, Plan())) == []
    assert compatibility.conclude(subject, Plan(), ScoredTraces()).verdict is Verdict.NOT_RUN


def test_two_swapped_ids_fail_with_both_strings(files: Callable[[], Files]) -> None:
    """The first differing id, both its tokens, and how many differ are named."""
    draft = files()
    one, other = draft.swap(280, 290)
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.FAIL
    finding = found(result, "id 280")
    assert finding.severity is Verdict.FAIL
    assert "2 ids that can be emitted" in finding.text
    assert f"id 280 is {one!r} to the target and {other!r} to the draft" in finding.text
    assert "id 280" in result.summary
    assert "target's own tokenizer" in result.advice
    assert result.measurements["num_emittable_differing_ids"] == 2
    for series in result.plots[0].series:
        assert (series.x, series.y) == ((0.0, 280.0, 290.0, float(VOCAB_SIZE)), (0.0, 1.0, 2.0, 2.0))


def test_reserved_ids_that_differ_are_worth_knowing_only(files: Callable[[], Files]) -> None:
    """What no text holds can't be drafted or emitted as another token."""
    draft = files()
    renamed = draft.tokenizer["model"]["vocab"]
    renamed["<|reserved_special_token_9|>"] = renamed.pop("<|reserved_special_token_0|>")
    draft.tokenizer["added_tokens"][3]["content"] = "<|reserved_special_token_9|>"
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "<|reserved_special_token_9|>" in found(result, "id 3").text
    assert [series.y[-1] for series in result.plots[0].series] == [1.0, 0.0]


def test_token_that_only_one_has_is_named(files: Callable[[], Files]) -> None:
    """With a row for it in both, an added token costs acceptance only."""
    target, draft = files(), files()
    target.add("<|tool|>")
    for one in (target, draft):
        one.model = FakeModel(vocab_size=320, num_embeddings=320)
    result = certified(target.load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "300 ('<|tool|>') in the target only" in found(result, "added tokens").text
    assert "id 300 is '<|tool|>' to the target and no token to the draft" in found(result, "id 300").text


def test_token_that_the_draft_cannot_read_fails(files: Callable[[], Files]) -> None:
    """The target emits it, and the draft has no embedding for it."""
    target, draft = files(), files()
    target.add("<|tool|>")
    target.model = FakeModel(vocab_size=320, num_embeddings=320)
    result = certified(target.load(), draft.load())
    assert result.verdict is Verdict.FAIL
    assert "no embedding in the draft" in found(result, "id 300").text


def test_token_that_the_target_cannot_verify_fails(files: Callable[[], Files]) -> None:
    """The draft emits an id beyond the target's output layer."""
    target, draft = files(), files()
    draft.add("<|tool|>")
    draft.model = FakeModel(vocab_size=320, num_embeddings=320)
    result = certified(target.load(), draft.load())
    assert result.verdict is Verdict.FAIL
    assert "reads out of bounds" in found(result, "id 300").text


def test_padding_rows_are_told_apart_from_tokens(files: Callable[[], Files]) -> None:
    """A padded output layer is no fault; the ids that are padding are named."""
    target, draft = files(), files()
    target.model = draft.model = FakeModel(vocab_size=320, num_embeddings=320)
    result = certified(target.load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "ids 300 to 319 are padding" in found(result, "output size of the target").text
    assert result.measurements["target_padding_rows"] == 20


def test_unlike_padding_passes_with_a_warning(files: Callable[[], Files]) -> None:
    """Qwen2.5 7B and 0.5B: the same tokenizer, other padding."""
    target = files()
    target.model = FakeModel(vocab_size=320, num_embeddings=320)
    result = certified(target.load(), files().load())
    assert result.verdict is Verdict.PASS
    assert "320 output rows and the draft 300" in found(result, "output sizes").text


def test_token_without_an_output_row_fails(files: Callable[[], Files]) -> None:
    """A text may need it, and the target can't say it; without a draft too."""
    target = files()
    target.model = FakeModel(vocab_size=290, num_embeddings=290)
    result = certified(target.load(), None)
    assert result.verdict is Verdict.FAIL
    assert "10 ids of the tokenizer have no output row" in found(result, "output size of the target").text


def test_other_template_costs_acceptance_only(files: Callable[[], Files]) -> None:
    """Prompts are rendered once; where the templates part is named."""
    draft = files()
    draft.template = "{{ messages[1].content }}"
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "from character 12 on" in found(result, "chat template").text
    draft.template = None
    assert "only the target has a chat template" in found(certified(files().load(), draft.load()), "chat template").text


def test_eos_of_the_draft_alone_fails(files: Callable[[], Files]) -> None:
    """An engine that takes the EOS from the draft cuts texts which the target would go on with."""
    draft = files()
    draft.eos = [0, 280]
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.FAIL
    assert "280" in found(result, "EOS ids").text
    assert "eos_token_id" in result.advice


def test_eos_of_the_target_alone_is_worth_knowing(files: Callable[[], Files]) -> None:
    """An instruct target with a base draft: drafts past the end are dropped."""
    target = files()
    target.eos = [0, 280]
    result = certified(target.load(), files().load())
    assert result.verdict is Verdict.PASS
    assert "not for the draft" in found(result, "EOS ids").text


@pytest.mark.parametrize(("eos", "said"), [(None, "names no EOS"), (5, "names only 5")])
def test_eos_missing_in_the_targets_generation_config_fails(
    files: Callable[[], Files], eos: int | None, said: str
) -> None:
    """Where a text ends then depends on which file an engine reads."""
    target, draft = files(), files()
    target.eos = draft.eos = eos
    result = certified(target.load(), draft.load())
    assert result.verdict is Verdict.FAIL
    assert said in found(result, "EOS of the target").text
    assert "generation_config.json" in result.advice


def test_other_bos_pad_and_unknown_tokens_are_named(files: Callable[[], Files]) -> None:
    """Roles that the draft gives to other tokens."""
    draft = files()
    draft.roles = {**draft.roles, "bos_token": "<|bos|>", "pad_token": "<|eos|>", "unk_token": "<|bos|>"}
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "none to the target and 2 ('<|bos|>') to the draft" in found(result, "BOS token").text
    assert found(result, "PAD token")
    assert found(result, "UNK token")


def test_shorter_draft_positions_say_where_drafting_stops(files: Callable[[], Files]) -> None:
    """The reference decoder stops drafting there, so it costs acceptance; whether the run gets there is said."""
    draft = files()
    draft.model = FakeModel(max_length=100)
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "512 positions and the draft 100" in found(result, "maximum positions").text
    run_tokens = 10 + Plan().max_new_tokens  # the prompt's and the plan's
    assert f"beyond this run's {run_tokens} tokens" in found(result, "maximum positions").text
    reached = certified(files().load(), draft.load(), Plan(max_new_tokens=200))
    assert "which this run reaches" in found(reached, "maximum positions").text


def test_larger_draft_is_named(files: Callable[[], Files]) -> None:
    """Target and draft were probably swapped."""
    draft = files()
    draft.model = FakeModel(num_parameters=2000)
    assert "were they swapped" in found(certified(files().load(), draft.load()), "parameters").text


def test_other_merges_show_by_what_they_do(files: Callable[[], Files]) -> None:
    """The id table is equal, the encoding is not."""
    draft = files()
    draft.tokenizer["model"]["merges"] = draft.tokenizer["model"]["merges"][:5]
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.PASS
    assert "encoded otherwise" in found(result, "encoding").text


def test_other_normaliser_shows_by_what_it_does(files: Callable[[], Files]) -> None:
    """NFKC changes ligatures and full-width letters."""
    draft = files()
    changed = Tokenizer.from_str(json.dumps(draft.tokenizer))
    changed.normalizer = normalizers.NFKC()
    draft.tokenizer = json.loads(changed.to_str())
    assert "ﬁne" in found(certified(files().load(), draft.load()), "encoding").text


def test_bos_that_only_the_target_inserts_is_named(files: Callable[[], Files]) -> None:
    """Prompts must be encoded once."""
    target = files()
    changed = Tokenizer.from_str(json.dumps(target.tokenizer))
    changed.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 2)])
    target.tokenizer = json.loads(changed.to_str())
    result = certified(target.load(), files().load())
    assert "puts [2] and [] around a text and the draft's nothing" in found(result, "BOS insertion").text


def test_ids_that_read_as_other_text_fail(files: Callable[[], Files]) -> None:
    """The same strings by id, and another decoder: the id means another text."""
    draft = files()
    draft.tokenizer["decoder"] = {"type": "Fuse"}
    result = certified(files().load(), draft.load())
    assert result.verdict is Verdict.FAIL
    assert "with the target's tokenizer" in found(result, "decoding").text


def test_unlike_vocabularies_name_how_many_ids_differ(files: Callable[[], Files]) -> None:
    """Only the first few are spelt out."""
    draft = files()
    for number in range(260, 280):
        draft.swap(number, number + 20)
    result = certified(files().load(), draft.load())
    assert "40 ids that can be emitted" in found(result, "id 260").text
    assert "and 35 more" in found(result, "id 260").text
    assert len(compare_ids(files().load(), draft.load())) == 40


def test_failures_come_first(files: Callable[[], Files]) -> None:
    """A reader with little time reads the first finding."""
    draft = files()
    draft.swap(280, 290)
    draft.template = None
    draft.model = FakeModel(max_length=100)
    severities = [finding.severity for finding in certified(files().load(), draft.load()).findings]
    assert severities[0] is Verdict.FAIL
    assert set(severities[1:]) == {Verdict.PASS}


def test_eos_ids_are_the_generation_configs_or_the_tokenizers(files: Callable[[], Files]) -> None:
    """In that order, sorted."""
    loaded = files()
    loaded.eos = [7, 3]
    assert eos_ids(loaded.load()) == (3, 7)
    assert eos_ids(replace(loaded.load(), generation_config=None)) == (0,)
    loaded.roles = {}
    loaded.eos = None
    assert eos_ids(loaded.load()) == ()
