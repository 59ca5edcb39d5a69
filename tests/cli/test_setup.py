"""Prompts are chosen evenly and deterministically; the watch draws bars that end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from specverify.cli.progress import Bars, Lines, watching
from specverify.cli.setup import balanced, encode
from specverify.errors import PromptError
from specverify.models.loading import load_model
from specverify.pairs import embedded
from specverify.records import Message, Prompt
from specverify.watch import Silent


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
    bars.close()
    bars.close()
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
    with pytest.raises(PromptError, match="does not take: no system turn"):
        encode([asked], target, positions=512, max_new_tokens=16)
    target.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="prompt 'chat' is a conversation"):
        encode([asked], target, positions=512, max_new_tokens=16)
