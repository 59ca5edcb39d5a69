"""Logits to probabilities: what `generate` would sample from, with the drafts before a position in view."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from specverify.errors import NonFiniteLogits
from specverify.records import SamplingParams
from specverify.sampling import probabilities

VOCAB_SIZE = 40
EOS = 7
PROMPT = (3, 5, 3, 9)

CELLS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "repetition_penalty": SamplingParams(repetition_penalty=1.7),
    "no_repeat": SamplingParams(no_repeat_ngram_size=1),
    "no_repeat_2": SamplingParams(no_repeat_ngram_size=2),
    "min_new_tokens": SamplingParams(min_new_tokens=3, eos_token_ids=(EOS,)),
    "banned": SamplingParams(banned_token_ids=((4,), (3, 9), (9, 11, 12)), eos_token_ids=(EOS,)),
    "combined": SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, no_repeat_ngram_size=2,
        min_new_tokens=2, banned_token_ids=((4,),), eos_token_ids=(EOS,),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    """A tiny model, of which only `generate`'s own choice of processors is used."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes))


def generates_own_law(
    module: LlamaForCausalLM, params: SamplingParams, ids: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """What `generate` would draw from after `ids`, by the processors that it builds itself."""
    config = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens or None,
        bad_words_ids=[list(banned) for banned in params.banned_token_ids] or None,
        eos_token_id=list(params.eos_token_ids) or None,
    )
    module._prepare_special_tokens(config, device=torch.device("cpu"))
    chain = module._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(PROMPT), encoder_input_ids=ids, device="cpu"
    )
    law: torch.Tensor = chain(ids, logits.clone()).double().softmax(-1)
    return law


def law_after(
    params: SamplingParams, ids: list[list[int]], logits: torch.Tensor, prompt: int = len(PROMPT)
) -> torch.Tensor:
    """Our law after the whole of each row."""
    lengths = torch.tensor([[len(row)] for row in ids])
    padded = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in ids])
    prompts = torch.full((len(ids),), prompt)
    return probabilities(
        logits[:, None], [params] * len(ids), token_ids=padded, prefix_lengths=lengths, prompt_lengths=prompts
    )[:, 0]


@pytest.mark.parametrize("name", CELLS)
def test_the_law_is_that_of_generate(module: LlamaForCausalLM, name: str) -> None:
    """For each parameter and all of them together, after texts of every length, by generate's own processors."""
    generator = torch.Generator().manual_seed(1)
    for new in range(5):
        ids = [*PROMPT, *torch.randint(VOCAB_SIZE, (new,), generator=generator).tolist()]
        logits = 2 * torch.randn(1, VOCAB_SIZE, generator=generator)
        expected = generates_own_law(module, CELLS[name], torch.tensor([ids]), logits)
        torch.testing.assert_close(law_after(CELLS[name], [ids], logits), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_block_is_what_its_positions_are_alone(name: str) -> None:
    """All positions of a ragged block at once, in a batch of mixed parameters: each as if it were asked by itself."""
    generator = torch.Generator().manual_seed(2)
    params = [CELLS[name], SamplingParams(temperature=0), CELLS[name], CELLS["combined"]]
    prompts, lengths = [1, 4, 3, 2], [2, 6, 5, 3]
    token_ids = torch.randint(VOCAB_SIZE, (4, 9), generator=generator)
    logits = 2 * torch.randn(4, 3, VOCAB_SIZE, generator=generator)
    together = probabilities(
        logits, params, token_ids=token_ids,
        prefix_lengths=torch.tensor(lengths)[:, None] + torch.arange(3), prompt_lengths=torch.tensor(prompts),
    )  # fmt: skip
    for row in range(4):
        for place in range(3):
            ids = [token_ids[row, : lengths[row] + place].tolist()]
            alone = law_after(params[row], ids, logits[row, place][None], prompts[row])
            torch.testing.assert_close(together[row, place], alone[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat", "no_repeat_2", "min_new_tokens", "banned"])
def test_prefix_dependent_parameters_see_the_drafts(name: str) -> None:
    """A law in which every position sees only the first one's prefix, as a known bug has it, is another."""
    params = replace(CELLS[name], min_new_tokens=2 if name == "min_new_tokens" else 0)
    drafted = {"no_repeat_2": [3, 30], "min_new_tokens": [20, 21], "banned": [3, 9]}.get(name, [20, 21])
    token_ids = torch.tensor([[*PROMPT, *drafted]])
    logits = torch.ones(1, 3, VOCAB_SIZE)
    logits[..., EOS] = 3
    lengths = len(PROMPT) + torch.arange(3)[None]
    where = {"token_ids": token_ids, "prompt_lengths": torch.tensor([len(PROMPT)])}
    seeing = probabilities(logits, [params], prefix_lengths=lengths, **where)
    blind = probabilities(logits, [params], prefix_lengths=lengths[:, :1].expand(-1, 3), **where)
    assert torch.equal(seeing[:, 0], blind[:, 0])
    assert float((seeing[:, 1:] - blind[:, 1:]).abs().sum()) > 0.01


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """The largest logit may be shared; the law is a point mass on the first of them."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [11, 4, 30]] = 5.0
    law = law_after(SamplingParams(temperature=0), [[1]], logits)
    assert law[0].nonzero().tolist() == [[4]]
    assert float(law.sum()) == 1


@pytest.mark.parametrize("temperature", [1e-6, 0.01])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_stay_finite(temperature: float, dtype: torch.dtype) -> None:
    """Half precision is widened before it is divided, so nothing overflows; the law is the greedy one, nearly."""
    logits = (30 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).to(dtype)
    law = law_after(SamplingParams(temperature=temperature), [[1]], logits)
    assert bool(law.isfinite().all())
    assert float(law.sum()) == pytest.approx(1)
    assert int(law.argmax()) == int(logits.float().argmax())


def test_parameters_that_leave_no_token_are_an_error() -> None:
    """Banning everything is refused, not answered with some id."""
    params = SamplingParams(temperature=0, banned_token_ids=tuple((token,) for token in range(VOCAB_SIZE)))
    words = "^the sampling parameters leave no token that may be emitted; loosen the bans or the minimum length$"
    with pytest.raises(NonFiniteLogits, match=words):
        law_after(params, [[1]], torch.zeros(1, VOCAB_SIZE))


@pytest.mark.parametrize("broken", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_broken_row_is_an_error(broken: float, temperature: float) -> None:
    """Wherever it stands in the batch: no law is made up for it, and none of the sound row's."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1] = broken
    for order in ([0, 1], [1, 0]):
        with pytest.raises(NonFiniteLogits):
            law_after(SamplingParams(temperature=temperature), [[1], [2]], logits[order])


@pytest.mark.parametrize("sizes", [(11, 12), (12, 11)])
def test_one_set_of_parameters_serves_two_vocabularies(sizes: tuple[int, int]) -> None:
    """A target's and its draft's are often padded to different sizes, and a ban remembers the first one that it saw."""
    params = SamplingParams(banned_token_ids=((3,), (sizes[0] - 2,)))
    for size in sizes:
        law = law_after(params, [[1]], torch.zeros(1, size))[0]
        allowed = [float(token not in {3, sizes[0] - 2}) / (size - 2) for token in range(size)]
        assert law.tolist() == pytest.approx(allowed)


def test_endings_do_not_change_the_law() -> None:
    """Length limits, stops and an EOS without a minimum length: rows that differ there alone have the same law."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    plain = law_after(SamplingParams(top_k=9), [[1]], logits)
    endings = SamplingParams(top_k=9, max_new_tokens=2, eos_token_ids=(EOS,), stop_token_ids=(3,), stop_strings=("a",))
    assert torch.equal(law_after(endings, [[1]], logits), plain)


def test_a_ban_on_an_eos_alone_is_not_a_ban() -> None:
    """As in transformers; so the EOS ids enter the law where something is banned."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    plain = law_after(SamplingParams(), [[1]], logits)[0]
    law = law_after(SamplingParams(eos_token_ids=(EOS,), banned_token_ids=((EOS,), (3,))), [[1]], logits)[0]
    assert float(law[EOS]) == pytest.approx(float(plain[EOS] / (1 - plain[3])))
    assert float(law[3]) == 0
