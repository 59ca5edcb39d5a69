"""Prompts are chosen evenly and deterministically; the watch draws bars that end."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from specverify.certify import run_check
from specverify.checks.compatibility import compatibility
from specverify.cli.invocation import Invocation
from specverify.cli.progress import Bars, Lines, watching
from specverify.cli.setup import balanced, encode, make_subject, require_names
from specverify.drafting import DraftModel, DraftTree, PromptLookup
from specverify.errors import PairError, PlanError, PromptError, UnsupportedModel
from specverify.models import kv_cache
from specverify.models.loading import load_model
from specverify.pairs import embedded
from specverify.plan import Plan
from specverify.records import DecodeRequest, Message, Prompt, SamplingParams, Verdict, count
from specverify.verification.rules import RULES, Drafts, NamedRule
from specverify.watch import Silent
from tests.unit.trees import rule_for

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.subject import Subject


def test_prompts_are_balanced_over_domains() -> None:
    """A small domain gives all that it has, the others share the rest; the order stays."""
    prompts = [Prompt(id=f"a{n}", domain="a", text="x") for n in range(10)]
    prompts += [Prompt(id="b0", domain="b", text="x")]
    prompts += [Prompt(id=f"c{n}", domain="c", text="x") for n in range(10)]
    chosen = balanced(prompts, 7)
    assert [prompt.domain for prompt in chosen] == ["a", "a", "a", "b", "c", "c", "c"]
    assert [prompt.id for prompt in chosen[:3]] == ["a0", "a4", "a9"]
    assert chosen == balanced(prompts, 7)
    assert balanced(prompts, 100) == tuple(prompts)


def test_watch_fits_its_surroundings() -> None:
    """Bars in a terminal, lines in a log and beside JSON, nothing when quiet."""
    terminal, log = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(watching(terminal, quiet=False, as_json=False), Bars)
    assert isinstance(watching(terminal, quiet=False, as_json=True), Lines)
    assert isinstance(watching(log, quiet=False, as_json=False), Lines)
    assert isinstance(watching(terminal, quiet=True, as_json=False), Silent)


def test_bars_end_full() -> None:
    """A stage that is decided early is done all the same; closing twice does no harm."""
    screen = io.StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=80))
    bars.stage("greedy", 4)
    bars.advance()
    bars.stage("lossless", 2)
    bars.stage("exactness", 0)
    bars.close()
    bars.close()
    assert "0/0" not in screen.getvalue()
    assert "so far, 0:00:00 left" in Text.from_ansi(screen.getvalue()).plain
    assert "4/4" in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_a_conversation_goes_through_the_targets_template() -> None:
    """Up to where the answer begins; what a template refuses is one sentence."""
    target = load_model(embedded().target)
    asked = Prompt(id="chat", domain="d", text="", messages=(Message("user", "Hello there"),))
    [encoded] = encode([asked], target, positions=512, max_new_tokens=16)
    text = target.tokenizer.decode(list(encoded.token_ids))
    assert "Hello there" in text
    assert len(text) > len("Hello there")
    target.tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    for template, said in (
        ("{{ raise_exception('no system turn') }}", "does not take .TemplateError: no system turn"),
        ("{% for i in range(10000000) %}x{% endfor %}", "does not take .OverflowError: Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ):
        target.tokenizer.chat_template = template
        with pytest.raises(PromptError, match=said):
            encode([asked], target, positions=512, max_new_tokens=16)
    target.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="prompt 'chat' is a conversation"):
        encode([asked], target, positions=512, max_new_tokens=16)


def test_a_tokenizer_that_panics_is_one_sentence() -> None:
    """A regex of its files may search for ever, and tokenizers then raises what is no Exception."""

    class Panic(BaseException):
        pass

    def encoded(text: str, **options: object) -> list[int]:
        raise Panic(text, options)

    target = SimpleNamespace(tokenizer=SimpleNamespace(encode=encoded), source="mine")
    with pytest.raises(PromptError, match="'a' is a text on which the tokenizer of mine fails"):
        encode([Prompt(id="a", domain="d", text="Hello")], target, positions=40, max_new_tokens=16)


def test_prompts_that_nobody_chose_give_way() -> None:
    """Ours are left out where they don't fit the pair; the user's own is named and refused."""
    target = load_model(embedded().target)
    asked = [Prompt(id="short", domain="d", text="Hello"), Prompt(id="long", domain="d", text="Hello there " * 40)]
    assert [one.id for one in encode(asked, target, positions=40, max_new_tokens=16, ours=True)] == ["short"]
    with pytest.raises(PromptError, match="prompt 'long' has"):
        encode(asked, target, positions=40, max_new_tokens=16)
    with pytest.raises(PromptError, match="give your own with --prompts"):
        encode(asked, target, positions=16, max_new_tokens=16, ours=True)


# ------------------------------------------------------------------------------------------------- rules and their drafts
@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule a way of drafting, named after it, beside those that are there."""
    for drafts in Drafts:
        monkeypatch.setitem(RULES, f"test-{drafts.name}", NamedRule(f"test-{drafts.name}", rule_for(drafts), drafts))


def made(**asked: object) -> Subject:
    """What the command line makes of these options on the embedded pair."""
    invocation = Invocation(**asked)
    plan = dataclasses.replace(invocation.plan(), max_prompts=2, max_new_tokens=4)
    require_names(invocation, plan)
    return make_subject(invocation, invocation.sources(), plan)


@pytest.mark.parametrize("drafts", Drafts, ids=lambda way: way.name)
def test_a_rule_brings_its_drafter(drafts: Drafts) -> None:
    """`--rule` is enough; the decoder knows how its drafts are drawn."""
    decoder = made(rule=f"test-{drafts.name}").decoder
    assert decoder.drafts is drafts
    if drafts in {Drafts.CHAIN, Drafts.COUPLED}:
        assert isinstance(decoder.drafter, DraftModel)
        assert decoder.drafter.coupled is (drafts is Drafts.COUPLED)
    else:
        assert isinstance(decoder.drafter, DraftTree)
        assert (decoder.drafter.drafts, decoder.drafter.branching) == (drafts, (3, 2, 1))
        assert (decoder.num_speculative_tokens, decoder.max_nodes) == (3, 15)


@pytest.mark.parametrize(
    ("number", "branching", "shape"),
    [(2, None, (3, 2)), (5, None, (3, 2, 1, 1, 1)), (4, "2, 2,1", (2, 2, 1)), (None, "4", (4,))],
)
def test_the_shape_of_a_tree_can_be_asked_for(
    number: int | None, branching: str | None, shape: tuple[int, ...]
) -> None:
    """The usual one is cut or made longer; what is asked is taken as it is."""
    decoder = made(rule="test-TOP_K", num_speculative_tokens=number, branching=branching).decoder
    assert isinstance(decoder.drafter, DraftTree)
    assert decoder.drafter.branching == shape
    assert decoder.num_speculative_tokens == (number or 3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"branching": "3,0"},
            "--branching '3,0' is no shape of a tree; give the children of each level, such as 3,2,1",
        ),
        ({"branching": "3,,1"}, "is no shape of a tree"),
        ({"branching": "-1"}, "is no shape of a tree"),
        ({"branching": "2,2,1,1"}, "has 4 levels, but at most 3 tokens are drafted .* --num-speculative-tokens 4"),
        ({"rule": "chain", "branching": "2"}, "--rule chain verifies chains.* leave --branching out"),
        ({"drafter": "prompt-lookup"}, "--rule test-TOP_K verifies trees, which prompt-lookup can't draft"),
    ],
)
def test_shapes_and_drafters_that_dont_fit_the_rule_are_refused(asked: dict[str, str], said: str) -> None:
    """Before anything is loaded, with what to do instead."""
    invocation = Invocation(**{"rule": "test-TOP_K", **asked})
    with pytest.raises(PlanError, match=said):
        require_names(invocation, invocation.plan())


def test_a_chain_rule_takes_drafts_from_the_prompt() -> None:
    """As before."""
    assert made(rule="match", drafter="prompt-lookup").decoder.drafter.vocab_size == PromptLookup(2048).vocab_size


def test_a_target_that_cant_take_trees_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain rule goes on with the same target."""
    monkeypatch.setattr(kv_cache, "counts_slots", lambda _: True)
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM attends by the distance of two slots .* --rule chain"
    ):
        made(rule="test-WITH_REPLACEMENT")
    assert isinstance(made(rule="chain").decoder.drafter, DraftModel)


# ------------------------------------------------------------------------------------------------- two vocabularies
def _other_tokenizer(folder: Path) -> Path:
    """A small random draft whose tokenizer was trained on a few words of its own."""
    words = Tokenizer(BPE())
    words.pre_tokenizer, words.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    words.train_from_iterator(["the cat and the other cat said that there was nothing there"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    size = words.get_vocab_size()
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=1, n_head=2, n_positions=512)).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("drafter", ["shared-ids", "text"])
def test_a_draft_with_another_tokenizer_changes_no_token(drafter: str, tmp_path: Path) -> None:
    """Greedy texts are the target's own, something is drafted, and the certificate says how ids are handed over."""
    pair = {"target": str(embedded().target), "draft": str(_other_tokenizer(tmp_path))}
    with pytest.raises(PairError, match="--drafter shared-ids"):
        made(**pair)
    subject = made(**pair, drafter=drafter)
    params = SamplingParams(temperature=0, max_new_tokens=12)
    rows = [
        DecodeRequest(id=f"{prompt.id}/{arm}", prompt_ids=prompt.token_ids, params=params, speculation=arm)
        for arm in (True, False)
        for prompt in subject.prompts
    ]
    traces = list(subject.engine.decode(rows))
    assert [trace.token_ids for trace in traces[:2]] == [trace.token_ids for trace in traces[2:]]
    assert count(traces).num_draft_tokens > 0
    result = run_check(compatibility, subject, Plan())
    assert result.verdict is Verdict.PASS
    assert any("handed over" in found.text for found in result.findings)
