"""A real engine held against the exact float64 law of the calibration pair; `python -m tests.engines.held --help` runs one.

Two routes that share no code: each token's PIT under its own context (specverify's scorer, KS, chi-square and e-process), and the
counts of the first tokens against their exact marginal laws, enumerated over every beginning (chi-square).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import chisquare

from specverify.checks.evidence import ORDERS, e_process
from specverify.engines import Capability, EngineSettings
from specverify.models.calibration import CalibrationPair, write_calibration_pair
from specverify.models.loading import load_pair
from specverify.records import DecodeRequest, SamplingParams
from specverify.scoring import score
from specverify.statistics.uniformity import chi_square_uniform, kolmogorov_smirnov

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specverify.engines import Engine
    from specverify.models import LanguageModel
    from specverify.records import DecodeTrace

PROMPTS = ((1, 2, 3, 4), (9, 20, 9, 5, 17, 30), (7, 7, 7), (28, 0, 14, 22, 3, 11, 19, 6))


@dataclass(frozen=True)
class Held:
    """What was seen."""

    engine: str
    tokens: int
    tokens_per_s: float
    log10_e: float
    """Of the e-process; the run fails from 6 on."""
    likeliest: str
    smallest_pit: float
    """Smallest p-value of KS and of chi-square over 16 cells, over the orders of the PIT: six in all."""
    chi_square: tuple[float, ...]
    """p-value of the marginal law of each of the first tokens, the smallest over the prompts."""
    acceptance: float
    """Accepted / drafted, by the engine's own counters; NaN where nothing was drafted."""
    drafted: int


def requests(
    params: SamplingParams,
    *,
    num_samples: int,
    seed: int,
    speculation: bool = True,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
) -> list[DecodeRequest]:
    return [
        DecodeRequest(
            id=f"prompt-{number}", prompt_ids=ids, params=params, seed=seed * 1000 + number, num_samples=num_samples,
            speculation=speculation,
        )
        for number, ids in enumerate(prompts)
    ]  # fmt: skip


def hold(
    engine: Engine,
    pair: CalibrationPair,
    *,
    tokens: int,
    speculation: bool = True,
    seed: int = 1,
    temperature: float = 1.0,
    new_tokens: int = 5,
    exact: int = 3,
) -> Held:
    """Draw about so many tokens and hold them against the target."""
    params = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, eos_token_ids=(pair.eos_token_id,))
    samples = max(1, tokens // new_tokens // len(PROMPTS))
    counted = engine.counters() if Capability.COUNTERS in engine.capabilities else None
    begun = time.perf_counter()
    traces = list(engine.decode(requests(params, num_samples=samples, seed=seed, speculation=speculation)))
    elapsed = time.perf_counter() - begun
    after = engine.counters() if counted else None
    loaded = load_pair(pair.target, pair.draft, device="cpu", dtype="float64")
    scored = score(traces, target=loaded.target.model, draft=loaded.draft.model)
    process = e_process(scored)
    drafted = after.num_draft_tokens - counted.num_draft_tokens if after else 0
    accepted = after.num_accepted_tokens - counted.num_accepted_tokens if after else 0
    return Held(
        engine=engine.name,
        tokens=len(scored),
        tokens_per_s=len(scored) / elapsed,
        log10_e=process.log10_e,
        likeliest=process.likeliest,
        smallest_pit=min(
            test(scored[order]).p_value for order in ORDERS for test in (kolmogorov_smirnov, chi_square_uniform)
        ),
        chi_square=marginals(traces, loaded.target.model, temperature=temperature, eos=pair.eos_token_id, most=exact),
        acceptance=accepted / drafted if drafted else float("nan"),
        drafted=drafted,
    )


@torch.inference_mode()
def marginals(
    traces: Sequence[DecodeTrace], model: LanguageModel, *, temperature: float, eos: int, most: int
) -> tuple[float, ...]:
    """Smallest p-value over the prompts of the counts of the first `most` tokens; an ended text counts as one more token."""
    smallest = [1.0] * most
    vocab = model.vocab_size
    for prompt in {trace.request.prompt_ids for trace in traces}:
        ours = [trace.token_ids for trace in traces if trace.request.prompt_ids == prompt]
        beginnings, weights, ended = [list(prompt)], np.ones(1), 0.0
        for place in range(most):
            logits = torch.cat(
                [model.logits(beginnings[at : at + 4096])[:, -1] for at in range(0, len(beginnings), 4096)]
            )
            law = (logits.double() / temperature).softmax(-1).numpy()
            joint = weights[:, None] * law
            expected = np.append(joint.sum(0), ended) * len(ours)
            counts = np.bincount([ids[place] if place < len(ids) else vocab for ids in ours], minlength=vocab + 1)
            kept = expected >= 5
            cells = [np.append(each[kept], each[~kept].sum()) for each in (counts, expected)]
            if cells[1][-1] < 5:  # the rest joins the smallest cell
                at = int(np.argmin(cells[1][:-1]))
                cells = [np.append(np.delete(each[:-1], at), each[at] + each[-1]) for each in cells]
            smallest[place] = min(smallest[place], float(chisquare(*cells).pvalue))
            ended += float(joint[:, eos].sum())
            rows, tokens = np.nonzero(np.arange(vocab) != eos * np.ones((len(joint), 1)))
            beginnings = [[*beginnings[row], token] for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)]
            weights = joint[rows, tokens]
    return tuple(smallest)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.held")
    parser.add_argument("folder", type=Path, help="where the calibration pair is, or is written")
    parser.add_argument("--mode", default="probabilistic", help="of llama.cpp")
    parser.add_argument("--serve", default="", help="command of a vLLM server, in place of llama.cpp")
    parser.add_argument("--serve-off", default="")
    parser.add_argument("--near", action="store_true", help="a draft near the target")
    parser.add_argument("--off", action="store_true", help="without speculation")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4)
    arguments = parser.parse_args()
    pair = write_calibration_pair(arguments.folder, opposed=not arguments.near, gguf=not arguments.serve)
    settings = EngineSettings(
        target=pair.target, draft=pair.draft, eos_token_ids=(pair.eos_token_id,), max_batch_size=arguments.slots,
        num_speculative_tokens=arguments.num_speculative_tokens, serve=arguments.serve,
        options=(("mode", arguments.mode),) if not arguments.serve else (("serve_off", arguments.serve_off),),
    )  # fmt: skip
    from specverify.engines.llamacpp import opened
    from specverify.engines.openai import opened_vllm

    with (opened_vllm if arguments.serve else opened)(settings) as engine:
        held = hold(
            engine, pair, tokens=arguments.tokens, speculation=not arguments.off, seed=arguments.seed,
            temperature=arguments.temperature,
        )  # fmt: skip
        print(  # noqa: T201 - what it is for
            json.dumps({**asdict(held), "off": arguments.off, "near": arguments.near, "retries": engine.retries})
        )


if __name__ == "__main__":
    main()
