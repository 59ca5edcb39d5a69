"""Fused rules decide as the float64 rules do, uniform by uniform."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specverify.choices import Stream, inverse_cdf
from specverify.choices.philox import Philox
from specverify.choices.scripted import Scripted
from specverify.errors import InternalError, NonFiniteLogits
from specverify.records import SamplingParams
from specverify.verification import chain as exact
from specverify.verification import fused
from specverify.verification.fused import LogitsProposal, rows
from specverify.verification.fused.cutoff import least_kept
from tests.unit.verification.fused_cases import DTYPES, PARAMS, case, laws, require_same, tied


@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.one_of(st.integers(2, 40), st.sampled_from([255, 256, 257, 1000, 5003])),
    padding=st.integers(0, 3),
    closeness=st.sampled_from([0.0, 0.7, 0.999, 1.0]),
    scale=st.sampled_from([0.1, 3.0, 20.0]),
    dtype=st.sampled_from(DTYPES),
    params=st.sampled_from(PARAMS),
    kept_sums=st.booleans(),
)
def test_chain_rejection(seed, vocab_size, padding, closeness, scale, dtype, params, kept_sums):
    """Against the float64 rule, for every dtype, size and sampling parameter."""
    ours, target, theirs, target_probs = case(
        seed, vocab_size=vocab_size, padding=padding, closeness=closeness, scale=scale, dtype=dtype, params=params
    )
    if tied(target, params, vocab_size) or tied(ours.draft_logits, params, vocab_size):
        return  # transformers keeps some of the ids that tie at the border, a threshold all
    if kept_sums:
        if params.top_k or params.top_p < 1 or params.min_p:
            return
        scores = ours.draft_logits[..., :vocab_size].float() / params.temperature
        ours = replace(ours, draft_log_sums=scores.double().logsumexp(-1))
    seeds = torch.arange(len(target)) + seed
    choices = Philox.start(seeds, seeds, window=target.shape[1])
    wanted = exact.chain_rejection(theirs, target_probs, choices)
    found = rows.chain_rejection(ours, target, choices, params, vocab_size=vocab_size)

    def uniform(row, place):
        stream = Stream.RESIDUAL if place < int(theirs.num_draft_tokens[row]) else Stream.BONUS
        return choices.uniform(stream, torch.tensor([[place]]))[row, 0]

    require_same(found, wanted, theirs, target_probs, uniform)


@given(seed=st.integers(0, 2**31), vocab_size=st.sampled_from([3, 256, 700]), params=st.sampled_from(PARAMS[:2]))
def test_sample_and_match(seed, vocab_size, params):
    """The target's own draws, so the same tokens but for a tie."""
    ours, target, theirs, target_probs = case(seed, vocab_size=vocab_size, params=params)
    seeds = torch.arange(len(target)) + seed
    choices = Philox.start(seeds, seeds, window=target.shape[1])
    wanted = exact.sample_and_match(theirs, target_probs, choices)
    found = rows.sample_and_match(ours, target, choices, params, vocab_size=vocab_size)
    bare = replace(theirs, draft_probs=torch.zeros_like(theirs.draft_probs))
    require_same(
        found,
        wanted,
        bare,
        target_probs,
        lambda row, place: choices.uniform(Stream.TARGET, torch.tensor([[place]]))[row, 0],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_of_tied_ids(dtype):
    """As the exact rule does, padding left out."""
    ours, target, theirs, target_probs = case(
        3, vocab_size=300, padding=5, dtype=dtype, params=SamplingParams(temperature=0.0)
    )
    target[:, :, 10] = target[:, :, 20] = target[..., :300].amax(-1)
    target_probs = laws(target, SamplingParams(temperature=0.0), 300)
    ours = replace(ours, token_ids=torch.full_like(ours.token_ids, 10))
    wanted = exact.greedy(replace(theirs, token_ids=ours.token_ids), target_probs, Scripted())
    found = rows.chain_rejection(ours, target, Scripted(), SamplingParams(temperature=0.0), vocab_size=300)
    assert found.num_accepted_tokens.tolist() == wanted.num_accepted_tokens.tolist()
    assert found.next_token_ids.tolist() == wanted.next_token_ids.tolist()


@pytest.mark.parametrize("offset", [-(2.0**-40), 0.0, 2.0**-40])
def test_a_uniform_at_its_threshold_is_decided_in_float64(offset):
    """Where float32 could not tell, the decision is still that of the float64 rule."""
    ours, target, theirs, target_probs = case(11, vocab_size=4_000, batch=1, closeness=0.3)
    for row in range(20):
        ours, target, theirs, target_probs = case(row, vocab_size=4_000, batch=1, closeness=0.3)
        ratio = float(exact.acceptance_probs(theirs, target_probs)[0, 0])
        choices = Scripted({Stream.ACCEPT: min(max(ratio + offset, 0.0), 1 - 2.0**-53)})
        wanted = exact.chain_rejection(theirs, target_probs, choices)
        assert torch.equal(rows.chain_rejection(ours, target, choices).num_accepted_tokens, wanted.num_accepted_tokens)


def test_a_token_of_probability_zero_never_passes():
    """Not even at u = 0, which generators do return."""
    target = torch.zeros(1, 2, 8)
    target[0, 0, 3] = -torch.inf
    ours = LogitsProposal(torch.tensor([[3]]), torch.tensor([1]), torch.zeros(1, 1, 8))
    found = rows.chain_rejection(ours, target, Scripted())
    assert found.num_accepted_tokens.tolist() == [0]
    assert found.next_token_ids.tolist() != [3]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_padding_is_never_emitted(uniform):
    """Even where its logits are the largest and the uniform is at an end, or where it was drafted."""
    target = torch.zeros(1, 2, 300)
    target[..., 290:] = 90.0
    ours = LogitsProposal(torch.tensor([[295]]), torch.tensor([1]), torch.zeros(1, 1, 300))
    choices = Scripted(dict.fromkeys(Stream, uniform))
    found = rows.chain_rejection(ours, target, choices, vocab_size=290)
    assert found.num_accepted_tokens.tolist() == [0]
    assert int(found.next_token_ids) < 290


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_is_named(broken):
    """With its place; a row that isn't looked at may hold anything."""
    ours, target, *_ = case(5, vocab_size=50, batch=2)
    target[1, int(ours.num_draft_tokens[1]) + 1 :] = broken
    rows.chain_rejection(ours, target, Scripted())
    target[1, 0, 7] = broken
    with pytest.raises(NonFiniteLogits) as caught:
        rows.chain_rejection(ours, target, Scripted())
    assert str(caught.value) == (
        "the target's logits at place 0 of row 1 give no distribution (NaN, +inf, or no id that may be emitted); "
        "check the weights, or the sampling parameters"
    )
    with pytest.raises(NonFiniteLogits, match="place 0 of row 1"):
        rows.greedy(ours, target, Scripted())


def test_what_a_row_does_not_decide_is_refused():
    """Penalties read the prefix, and float64 goes to the exact rule."""
    ours, target, *_ = case(5, vocab_size=50)
    with pytest.raises(InternalError, match=r"^a fused rule knows temperature, .* what depends on the prefix$"):
        rows.chain_rejection(ours, target, Scripted(), SamplingParams(repetition_penalty=1.2))
    with pytest.raises(InternalError, match=r"^fused rules take float32, .* go to verification\.chain$"):
        rows.chain_rejection(ours, target.double(), Scripted())


def held_over_many_cases():
    """The fused rule against the exact one, some thousand decisions."""
    for seed in range(60):
        ours, target, theirs, target_probs = case(seed, vocab_size=50, batch=32, closeness=0.3)
        seeds = torch.arange(len(target)) + seed
        choices = Philox.start(seeds, seeds, window=target.shape[1])
        wanted = exact.chain_rejection(theirs, target_probs, choices)
        streams = torch.where(wanted.num_accepted_tokens < theirs.num_draft_tokens, Stream.RESIDUAL, Stream.BONUS)
        ends = choices.uniform(streams[:, None], wanted.num_accepted_tokens[:, None])[:, 0]
        found = rows.chain_rejection(ours, target, choices)
        require_same(found, wanted, theirs, target_probs, lambda row, _place, ends=ends: ends[row])


FAULTS = {
    "replacement from the target": ("remove", lambda _self, _other: None),
    "a target whose law is 1 % too large": (
        "prob",
        lambda self, token: float(self.weights[token]) / self.total * (1.01 if self._role == "target" else 1.0),
    ),
    "the likeliest id in place of a draw": ("drawn", lambda self, _uniform: int(self.weights.argmax())),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_show(fault, monkeypatch):
    """The comparison with the float64 rule is no formality: each of these fails it."""
    monkeypatch.setattr(rows._Row, *FAULTS[fault])
    with pytest.raises(AssertionError):
        held_over_many_cases()


@pytest.mark.parametrize("drafted", [-1, 0, 50, 52])
def test_after_an_id_that_is_none_comes_the_residual_of_its_own_row(drafted):
    """An id below or beyond the vocabulary is refused before its rows are read, and the row before it left others there."""
    target, draft = torch.randn(2, 2, 2, 55, generator=torch.Generator().manual_seed(3))
    ours = LogitsProposal(torch.full((2, 1), drafted), torch.ones(2, dtype=torch.int64), draft[:, :1])
    p, q = (logits[:, 0, :50].double().softmax(-1) for logits in (target, draft))
    left = (p - q).clamp(min=0)
    for uniform in (0.1, 0.5, 0.9):
        choices = Scripted({Stream.ACCEPT: 1 - 2.0**-53, Stream.RESIDUAL: uniform})
        found = rows.chain_rejection(ours, target, choices, vocab_size=50)
        refused = found.num_accepted_tokens == 0
        assert bool(refused.all()) or drafted == 0
        wanted = inverse_cdf(left, torch.full((2,), uniform, dtype=torch.float64))
        assert torch.equal(found.next_token_ids[refused], wanted[refused])


@pytest.mark.parametrize(("drafted", "draft", "place"), [(-1, False, 0), (-1, True, 0), (0, True, 0), (0, False, 1)])
def test_a_broken_row_is_named_wherever_it_is_read(drafted, draft, place):
    """Where the replacement of an impossible id reads it, and where the bonus does."""
    laws = torch.zeros(2, 2, 4)
    broken = torch.zeros(2, 1, 4) if draft else laws
    broken[1, place] = torch.nan
    ours = LogitsProposal(
        torch.full((2, 1), drafted), torch.ones(2, dtype=torch.int64), broken if draft else torch.zeros(2, 1, 4)
    )
    with pytest.raises(
        NonFiniteLogits, match=f"the {'draft' if draft else 'target'}'s logits at place {place} of row 1"
    ):
        rows.chain_rejection(ours, laws, Scripted())


@pytest.mark.parametrize(("of_target", "of_draft", "accepted"), [(-torch.inf, -torch.inf, 0), (0.0, -torch.inf, 1)])
def test_a_draft_that_its_drafter_calls_impossible(of_target, of_draft, accepted):
    """As in float64: accepted where the target may say it, whatever its probability."""
    target, draft = torch.zeros(1, 2, 4), torch.zeros(1, 1, 4)
    target[0, 0, 2], draft[0, 0, 2] = of_target, of_draft
    ours = LogitsProposal(torch.tensor([[2]]), torch.tensor([1]), draft)
    assert rows.chain_rejection(ours, target, Scripted()).num_accepted_tokens.tolist() == [accepted]


def test_the_first_id_of_the_padding_is_none():
    """Where the vocabulary fills its last chunk, too."""
    ours = LogitsProposal(torch.tensor([[256]]), torch.tensor([1]), torch.zeros(1, 1, 257))
    found = rows.chain_rejection(ours, torch.zeros(1, 2, 257), Scripted(), vocab_size=256)
    assert found.num_accepted_tokens.tolist() == [0]


def shown(scores, **params):
    """The least probability that is kept of each row of a law."""
    return least_kept(torch.tensor(scores).log(), SamplingParams(**params)).exp().tolist()


def test_the_cutoff_of_small_laws():
    """By hand, row by row; -inf (here 0) where nothing is cut off."""
    law, flat = [0.1, 0.4, 0.2, 0.3], [0.25] * 4
    assert shown([law, flat]) == [0, 0]
    assert shown([law, flat], top_k=4) == [0, 0]
    assert shown([law, law[::-1]], top_k=1) == pytest.approx([0.4, 0.4])
    assert shown([law], top_k=3) == pytest.approx([0.2])
    assert shown([law, flat], min_p=0.5) == pytest.approx([0.2, 0.125])
    assert shown([law, law[::-1]], top_p=0.6) == pytest.approx([0.3, 0.3])
    assert shown([law], top_p=0.55, top_k=2) == pytest.approx([0.4]), "of what top-k left, 4/7 is enough"
    assert shown([law], top_p=0.6, top_k=2) == pytest.approx([0.3]), "and 4/7 is not"


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 258, 2_047, 2_048, 2_049, 20_000])
def test_top_p_of_a_flat_law_looks_at_as_many_ids_as_it_takes(vocab_size):
    """Falling by a hair from id to id, so that the place of the cut can be read off its score."""
    scores = -torch.arange(vocab_size, dtype=torch.float32) / 2**22
    mass = scores.double().softmax(-1).cumsum(-1)
    for place in {0, 254, 255, 256, 2_046, 2_047, 2_048, vocab_size - 2} & set(range(vocab_size - 1)):
        middle = float(mass[place]) - 0.5 / vocab_size
        assert int(-least_kept(scores, SamplingParams(top_p=middle)) * 2**22) == place


def test_the_door_hands_everything_on(monkeypatch):
    """On the CPU to `rows`: parameters and padding count. Where the logits lie on CUDA, to the kernels, with keyed choices."""
    params = SamplingParams(temperature=0.3)
    ours, target, *_ = case(8, vocab_size=60, batch=64, padding=4, params=params)
    seeds = torch.arange(64)
    choices = Philox.start(seeds, seeds)
    found = fused.chain_rejection(ours, target, choices, params, vocab_size=60)
    wanted = rows.chain_rejection(ours, target, choices, params, vocab_size=60)
    assert torch.equal(found.num_accepted_tokens, wanted.num_accepted_tokens)
    assert torch.equal(found.next_token_ids, wanted.next_token_ids)
    on_cuda = SimpleNamespace(device=torch.device("cuda"))
    stand_in = SimpleNamespace(
        keyed=lambda asked: ("keyed", asked), chain_rejection=lambda *handed, **named: (*handed, named)
    )
    monkeypatch.setitem(sys.modules, "specverify.verification.fused.kernels", stand_in)
    monkeypatch.setattr(fused, "kernels", stand_in, raising=False)
    handed = fused.chain_rejection(ours, on_cuda, choices, params, vocab_size=60)
    assert handed == (ours, on_cuda, ("keyed", choices), params, {"vocab_size": 60})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", [*PARAMS, SamplingParams(temperature=2.0)])
def test_every_dtype_under_every_parameter(dtype, params):
    """What the random cases above may miss: 256 rows of each."""
    ours, target, theirs, target_probs = case(2, vocab_size=50, batch=256, closeness=0.3, dtype=dtype, params=params)
    untied = [
        row
        for row in range(256)
        if not tied(target[row, None], params, 50) and not tied(ours.draft_logits[row, None], params, 50)
    ]
    assert len(untied) > 100
    seeds = torch.arange(256)
    choices = Philox.start(seeds, seeds)
    wanted = exact.chain_rejection(theirs, target_probs, choices)
    found = rows.chain_rejection(ours, target, choices, params)
    assert torch.equal(found.num_accepted_tokens[untied], wanted.num_accepted_tokens[untied])
    same = found.next_token_ids[untied] == wanted.next_token_ids[untied]
    assert float(same.double().mean()) > 0.99, "but for a uniform at a border"


def test_a_buffer_is_kept_for_its_size():
    """In a thread that has none yet; zeros to the end of its last chunk; another size takes another one."""
    seen = []

    def take():
        first = rows._buffer(300, "a role of this test")
        first[:300] = 1
        seen.append((first, rows._buffer(300, "a role of this test"), rows._buffer(200, "a role of this test")))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    [(first, again, other)] = seen
    assert again is first
    assert (len(first), float(first[300:].sum())) == (512, 0.0)
    assert (len(other), float(other.sum())) == (256, 0.0)


def test_a_search_tells_uniforms_apart_in_float64():
    """A float32 would put the first one on the border, which is the second id's."""
    masses = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    assert rows._searched(masses, 0.5 - 2.0**-40) == (0, pytest.approx(1 - 2.0**-39, abs=1e-15))
    assert rows._searched(masses, 0.5) == (2, 0.0)
