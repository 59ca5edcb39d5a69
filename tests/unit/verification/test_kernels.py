"""The Triton programs, run by Triton's interpreter where there is no GPU, against the float64 rule."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from specverify.choices import Stream
from specverify.choices.philox import Philox
from specverify.choices.scripted import Scripted
from specverify.errors import InternalError, NonFiniteLogits
from specverify.records import SamplingParams
from specverify.verification import chain as exact
from specverify.verification.fused import LogitsProposal, rows
from tests.unit.verification.fused_cases import PARAMS, case, require_same, tied

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which comes with a CUDA build of torch; `tox -e triton`", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where a program is defined

from specverify.verification.fused import kernels  # noqa: E402 - after the interpreter was asked for

ON = [pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(DEVICE == "cuda", reason="programs are compiled"))]
ON += [pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specverify.verification.fused import kernels

POINTERS = dict.fromkeys(("counts", "token_ids", "seeds", "sequences", "positions", "steps", "accepted", "broken", "next_ids"), "*i64")
POINTERS |= dict.fromkeys(("uniforms", "plain", "residual"), "*fp64") | dict.fromkeys(("logits", "target", "draft"), "*bf16")
SCALARS = dict.fromkeys(("stride_row", "stride_place", "extra", "vocab_size"), "i32") | {"temperature": "fp32"}
SCALARS |= {f"{model}_{part}": "i32" for model in ("target", "draft") for part in ("row", "place")}
for flag in (False, True):
    constants = {"n": 6, "k": 5, "splits": 32, "padded": 32, "has_least": flag, "keeps": flag, "block": 1024, "blocks": 4}
    for program in (kernels._sums, kernels._scan, kernels._masses, kernels._draw):
        names = program.arg_names
        types = {name: "constexpr" if name in constants else (POINTERS | SCALARS).get(name, "*fp32") for name in names}
        values = {(place,): constants[name] for place, name in enumerate(names) if name in constants}
        made = triton.compile(ASTSource(program, signature=types, constexprs=values), target=GPUTarget("cuda", 90, 32))
        assert made.asm["cubin"]
"""


def on(device, ours, target):
    """The same case where it is to be verified."""
    moved = (each.to(device) for each in (ours.token_ids, ours.num_draft_tokens, ours.draft_logits))
    sums = ours.draft_log_sums
    return LogitsProposal(*moved, None if sums is None else sums.to(device)), target.to(device)


CASES = (  # vocabulary, sampling parameters, dtype, how near the draft is
    (5, PARAMS[0], torch.float32, 0.0),
    (1_025, PARAMS[1], torch.bfloat16, 0.7),
    (5_003, PARAMS[0], torch.float16, 0.7),
    (1_025, PARAMS[4], torch.float32, 0.7),
    (5, PARAMS[2], torch.float32, 1.0),
    (300, PARAMS[3], torch.float32, 0.3),  # drafts that the target cuts off
)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("vocab_size", "params", "dtype", "closeness"), CASES)
def test_chain_rejection(vocab_size, params, dtype, closeness, device):
    """Against the float64 rule with the same choices, drafts from far and near laws, padding after the vocabulary."""
    for seed in range(3 if device == "cpu" else 200):
        ours, target, theirs, target_probs = case(
            seed, vocab_size=vocab_size, batch=3, padding=2, closeness=closeness, dtype=dtype, params=params
        )
        if tied(target, params, vocab_size) or tied(ours.draft_logits, params, vocab_size):
            continue
        seeds = torch.arange(len(target)) + 2**40 + seed
        choices = Philox.start(seeds, seeds, window=target.shape[1])
        wanted = exact.chain_rejection(theirs, target_probs, choices)
        there = seeds.to(device)
        found = kernels.chain_rejection(
            *on(device, ours, target), Philox.start(there, there, window=4), params, vocab_size=vocab_size
        )
        found = replace(
            found, num_accepted_tokens=found.num_accepted_tokens.cpu(), next_token_ids=found.next_token_ids.cpu()
        )

        def uniform(row, place, choices=choices, theirs=theirs):
            stream = Stream.RESIDUAL if place < int(theirs.num_draft_tokens[row]) else Stream.BONUS
            return choices.uniform(stream, torch.tensor([[place]]))[row, 0]

        require_same(found, wanted, theirs, target_probs, uniform)


@pytest.mark.parametrize("device", ON)
def test_sums_that_the_drafter_kept(device):
    """Are used in place of its rows."""
    ours, target, *_ = case(4, vocab_size=1_500, batch=2)
    kept = replace(ours, draft_log_sums=ours.draft_logits.logsumexp(-1))
    seeds = torch.arange(len(target))
    found = kernels.chain_rejection(*on(device, kept, target), Philox.start(seeds.to(device), seeds.to(device)))
    wanted = rows.chain_rejection(ours, target, Philox.start(seeds, seeds))
    assert found.num_accepted_tokens.tolist() == wanted.num_accepted_tokens.tolist()
    assert found.next_token_ids.tolist() == wanted.next_token_ids.tolist()


@pytest.mark.parametrize("device", ON)
def test_nothing_drafted(device):
    """Gives the bonus alone."""
    ours, target, theirs, target_probs = case(4, vocab_size=300, drafts=0)
    seeds = torch.arange(len(target))
    found = kernels.chain_rejection(*on(device, ours, target), Philox.start(seeds.to(device), seeds.to(device)))
    wanted = exact.chain_rejection(theirs, target_probs, Philox.start(seeds, seeds))
    assert found.next_token_ids.tolist() == wanted.next_token_ids.tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy, which warns of NaN and overflow
@pytest.mark.parametrize("device", ON)
def test_a_broken_row_is_named(device):
    """With its place; a row that isn't looked at may hold anything."""
    ours, target, *_ = case(5, vocab_size=50, batch=2)
    seeds = torch.arange(2).to(device)
    target[1, int(ours.num_draft_tokens[1]) + 1 :] = torch.nan
    kernels.chain_rejection(*on(device, ours, target), Philox.start(seeds, seeds))
    for broken in (torch.nan, torch.inf):
        target[1, 0, 7] = broken
        with pytest.raises(NonFiniteLogits, match="place 0 of row 1"):
            kernels.chain_rejection(*on(device, ours, target), Philox.start(seeds, seeds))
        with pytest.raises(NonFiniteLogits, match="place 0 of row 1"):
            kernels.chain_rejection(
                *on(device, ours, target), Philox.start(seeds, seeds), SamplingParams(temperature=0)
            )


@pytest.mark.parametrize("device", ON)
def test_greedy_takes_the_lowest_of_tied_ids(device):
    """As the CPU's rule does."""
    ours, target, *_ = case(3, vocab_size=300, params=SamplingParams(temperature=0.0))
    target[:, :, 10] = target[:, :, 20] = target.amax(-1)
    ours = replace(ours, token_ids=torch.full_like(ours.token_ids, 10))
    found, wanted = kernels.greedy(*on(device, ours, target)), rows.greedy(ours, target, Scripted())
    assert found.num_accepted_tokens.tolist() == wanted.num_accepted_tokens.tolist()
    assert found.next_token_ids.tolist() == wanted.next_token_ids.tolist()


def test_choices_of_another_kind_are_refused():
    """A program draws its own uniforms."""
    with pytest.raises(InternalError, match="Philox"):
        kernels.keyed(Scripted())


def test_programs_compile_for_a_gpu_that_is_not_here():
    """To machine code of an H100 or H200, with every flag on and off; what they do there needs one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2_000:]
