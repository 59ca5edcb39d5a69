"""Rankings that are known: which draft is named, when speculation is called a loss, and what is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.cli.rank import _invocations
from specverify.codec import dump, load_as
from specverify.rank import Choice, RankedDraft, Ranking, _by_position, pareto_plot, sentence
from specverify.records import DecodeRequest, DecodeStep, DecodeTrace, FinishReason
from specverify.report.plots import svg
from specverify.report.rank import ranking_table


def choice(batch, speedup, number=3):
    """Of a draft at a batch size."""
    return Choice(
        batch=batch, num_speculative_tokens=number, speedup=speedup, low=speedup - 0.1, high=speedup + 0.1,
        speedups=(0.9, 0.8, speedup), cost_ratio=0.1,
    )  # fmt: skip


def draft(name, memory, *speedups):
    """Above 1 a gain, else a loss."""
    choices = tuple(
        choice(batch, each) if each > 1 else replace(choice(batch, 1.0, 0), speedups=(each,))
        for batch, each in zip((1, 8), speedups, strict=True)
    )
    return RankedDraft(
        name=name, acceptance_by_position=(0.8, 0.7), num_tokens=100, memory_bytes=memory, kv_cache_per_token_bytes=1,
        choices=choices,
    )  # fmt: skip


RANKING = Ranking(
    target="t",
    target_memory_bytes=10_000_000,
    batches=(1, 8),
    drafts=(
        draft("large", 4_000_000, 2.0, 0.9),
        draft("small", 1_000_000, 1.8, 0.8),
        draft("waste", 5_000_000, 1.5, 0.7),
    ),
)


def test_the_best_draft_is_named_for_each_batch_and_a_loss_is_said():
    """A batch at which each draft loses is told apart from one at which one gains."""
    assert (
        sentence(RANKING)
        == "at batch 1 take large with 3 tokens (2.00x [1.90, 2.10]); at batch 8 speculation is a loss"
    )
    assert not RANKING.loss


def test_a_drafts_name_obeys_nobodys_terminal():
    """Control characters of a folder's name are not printed."""
    (name,) = _invocations("target", ["dr\x1b[31maft"], most=3, trust_remote_code=False)
    assert name == "dr\ufffd[31maft"


def test_a_loss_everywhere():
    """Is one sentence."""
    ranking = replace(RANKING, drafts=(draft("bad", 1, 0.9, 0.9),))
    assert ranking.loss
    assert sentence(ranking).startswith("speculation is a loss with every draft")


def test_the_front_leaves_out_what_a_smaller_draft_beats():
    """And begins with no draft at all."""
    plot = pareto_plot(RANKING)
    assert plot.series[-1].x == (0.0, 1.0, 4.0)
    assert plot.series[-1].y == (1.0, 1.8, 2.0)
    assert "<svg" in svg(plot)


def test_the_table_shows_losses_with_their_best():
    """A number that is below 1 still says how far."""
    text = ranking_table(RANKING)
    assert "3: 2.00x [1.90, 2.10]" in text
    assert "a loss (best 0.90x)" in text


def test_a_ranking_survives_its_file():
    """As every record does."""
    assert load_as(Ranking, dump(RANKING)) == RANKING


def test_acceptance_by_position_counts_drafts_that_were_reached():
    """A draft behind a rejection was not verified, so it is not in the rate of its position."""
    steps = (DecodeStep(3, 3, 4), DecodeStep(3, 1, 2), DecodeStep(1, 0, 1))
    request = DecodeRequest(id="r", prompt_ids=(1,))
    trace = DecodeTrace(request=request, sample=0, token_ids=(), finish=FinishReason.LENGTH, steps=steps)
    rates = _by_position([trace], 4)
    assert rates[:3] == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert rates[3] != rates[3]
