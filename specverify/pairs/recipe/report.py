"""The data card's tables, all measured here from the shipped files."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoTokenizer

from specverify.pairs.recipe import measure
from specverify.pairs.recipe.make import encode, read_documents
from specverify.pairs.recipe.train import held_out_nats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["report"]

_DRAFTS = ("draft", "draft-marginal", "draft-poor")
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_SHOWN = ("austen-04", "dialogue-02", "shakespeare-04", "code-06")
_GREEDY_PROMPTS = 16
_TIMED_PROMPTS = 6


def report(pair: Path, *, austen: Path | None, shakespeare: Path | None, write: bool) -> None:
    """Print the tables as Markdown; `write` puts them between the marks in the folder's README.md."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    models = {name: measure.load(pair / name) for name in ("target", *_DRAFTS)}
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {(row := json.loads(line))["id"]: (row["domain"], tokenizer(row["text"])["input_ids"]) for line in lines}
    nats = _nats(models, tokenizer, austen, shakespeare) if austen and shakespeare else {}
    sections = [
        [
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, one thread."
        ],
        _sizes(pair, models, nats),
        _acceptances(models, prompts, tokenizer.eos_token_id),
        _costs(models, prompts),
        _texts(models["target"], prompts, tokenizer),
    ]
    text = "\n\n".join("\n".join(section) for section in sections)
    print(text)  # noqa: T201 - a command's own words
    if write:
        card = pair / "README.md"
        before, _, rest = card.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        card.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")


def _table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _nats(
    models: Mapping[str, LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast, austen: Path, shakespeare: Path
) -> dict[str, dict[str, float]]:
    """By model and domain, on the works that are held out."""
    streams = {domain: encode(tokenizer, part) for domain, part in read_documents(austen, shakespeare).unseen.items()}
    return {
        name: {domain: held_out_nats(model, stream) for domain, stream in streams.items()}
        for name, model in models.items()
    }


def _sizes(pair: Path, models: Mapping[str, LlamaForCausalLM], nats: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Shape, training and file of each model; `training.json` is what the training run wrote down."""
    trained = json.loads((pair / "training.json").read_text(encoding="utf-8"))
    domains = list(next(iter(nats.values()), {}))

    def row(name: str, model: LlamaForCausalLM) -> list[str]:
        weights, shape = pair / name / "model.safetensors", model.config
        return [
            f"`{name}`",
            f"{shape.num_hidden_layers} × {shape.hidden_size}",
            f"{model.num_parameters():,}",
            str(trained[name]["steps"]),
            f"{trained[name]['seconds']:.0f}",
            *(f"{nats[name][domain]:.3f}" for domain in domains),
            f"{weights.stat().st_size / 1e6:.2f}",
            f"`{hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}`",
        ]

    head = ["model", "layers × hidden", "parameters", "steps", "training, wall s"]
    head += [f"nats a token, {domain}" for domain in domains] + ["fp16 file, MB", "sha-256 begins"]
    total = sum(path.stat().st_size for path in pair.rglob("*") if path.is_file() and path.name != "README.md")
    return [
        *_table(head, (row(name, model) for name, model in models.items())),
        "",
        f"All files: {total / 1e6:.2f} MB.",
    ]


def _acceptances(
    models: Mapping[str, LlamaForCausalLM], prompts: Mapping[str, tuple[str, list[int]]], eos_token_id: int
) -> list[str]:
    """Two temperatures overall, each domain at 1."""
    drafts = {name: models[name] for name in _DRAFTS}
    samples, found = {}, {}
    for temperature in (1.0, 0.7):
        samples[temperature] = measure.own_samples(
            models["target"], prompts.values(), temperature=temperature, seed=21, eos_token_id=eos_token_id
        )
        found[temperature] = measure.acceptance(models["target"], drafts, samples[temperature], temperature=temperature)
    domains = list(dict.fromkeys(domain for domain, _ in prompts.values()))

    def row(name: str) -> list[str]:
        cells = [found[temperature][name, "all"] for temperature in (1.0, 0.7)]
        overall = [f"{cell.mean:.3f} ± {1.96 * cell.standard_error:.3f}" for cell in cells]
        return [f"`{name}`", *overall, *(f"{found[1.0][name, domain].mean:.2f}" for domain in domains)]

    lengths = [len(new) for _, _, new in samples[1.0]]
    ended = sum(new[-1] == eos_token_id for _, _, new in samples[1.0])
    return [
        f"Acceptance, mean Σ min(p, q) over the target's own samples ({sum(lengths):,} tokens at temperature 1; ± is 95 %, by prompt):",
        "",
        *_table(["draft", "all, T = 1", "all, T = 0.7", *domains], (row(name) for name in _DRAFTS)),
        "",
        f"Those samples have {sum(lengths) / len(lengths):.0f} tokens on average, cut at 120; {ended} of {len(lengths)} ended by themselves.",
    ]


def _costs(models: Mapping[str, LlamaForCausalLM], prompts: Mapping[str, tuple[str, list[int]]]) -> list[str]:
    """Step times, what a bare loop gains, and whether its greedy text stays the same."""
    target, counts = models["target"], (1, 3, 5, 9)
    steps = measure.step_ms(
        {f"target {n}": (target, n) for n in counts} | {name: (models[name], 1) for name in _DRAFTS}
    )
    times = ", ".join(f"T({n}) {steps[f'target {n}']:.2f} ms" for n in counts)
    austen = [ids for domain, ids in prompts.values() if domain in {"austen", "dialogue"}]

    def row(name: str) -> list[str]:
        gains = [_gain(target, models[name], austen[::5], k, temperature) for temperature in (0.0, 1.0) for k in (2, 4)]
        ratio = steps[name] / steps["target 1"]
        return [f"`{name}`", f"{steps[name]:.2f}", f"{ratio:.3f}", *(f"{gain:.2f}x" for gain in gains)]

    head = ["draft", "T(1), ms", "c", "greedy, 2 tokens", "greedy, 4", "T = 1, 2 tokens", "T = 1, 4"]
    same = sum(_same_greedy(target, models["draft"], ids) for ids in austen[:_GREEDY_PROMPTS])
    return [
        f"Batch 1, CPU time of one thread, context 64, median of 80. Target: {times}.",
        f"Speed-up of a bare loop over plain decoding (the same lines, {_TIMED_PROMPTS} prompts × 64 tokens, in turns):",
        "",
        *_table(head, (row(name) for name in _DRAFTS)),
        "",
        f"Greedy in fp32, 4 tokens a proposal against none: {same} of {_GREEDY_PROMPTS} texts are the same.",
    ]


def _gain(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[list[int]], k: int, temperature: float
) -> float:
    plain = fast = 0.0
    for seed, prompt in enumerate(prompts[:_TIMED_PROMPTS]):
        plain += measure.cpu_s(target, None, prompt, num_speculative_tokens=0, temperature=temperature, seed=seed)
        fast += measure.cpu_s(target, draft, prompt, num_speculative_tokens=k, temperature=temperature, seed=seed)
    return plain / fast


def _same_greedy(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: list[int]) -> bool:
    generator = torch.Generator().manual_seed(0)
    plain, fast = (
        measure.decode(
            target, draft, prompt, num_speculative_tokens=k, num_tokens=64, temperature=0.0, generator=generator
        )
        for k in (0, 4)
    )
    return plain == fast


def _texts(
    target: LlamaForCausalLM, prompts: Mapping[str, tuple[str, list[int]]], tokenizer: PreTrainedTokenizerFast
) -> list[str]:
    """What the target writes at temperature 0.7."""
    lines = ["Samples of the target at temperature 0.7 (the prompt comes first, up to the bar):"]
    for name in _SHOWN:
        prompt = prompts[name][1]
        [(_, _, new)] = measure.own_samples(
            target, [prompts[name]], temperature=0.7, seed=5, eos_token_id=tokenizer.eos_token_id
        )
        lines += ["", "```text", f"{tokenizer.decode(prompt)}│{tokenizer.decode(new)}", "```"]
    return lines
