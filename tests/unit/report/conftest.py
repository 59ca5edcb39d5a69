"""A certificate as a run on a real pair would make it, with everything in it that a renderer can stumble over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specverify.records import (
    Certificate,
    CheckResult,
    Environment,
    ErrorBudget,
    Finding,
    ModelFingerprint,
    Plot,
    PlotKind,
    Series,
    StatisticalTest,
    Verdict,
)

HOSTILE = "<script>alert('x')</script> | a\x00\x1b[31mb \u202e `c` @team ]]> $\\frac & \"q\""
"""A prompt that wants to be HTML, a table cell, a terminal sequence, a formula and a mention."""


def e_process(end: float) -> Plot:
    places = [float(token) for token in range(0, 20_001, 200)]
    return Plot(
        id="lossless/e_process",
        title="Evidence against the target's law",
        x_label="tokens",
        y_label="log10 of the e-value",
        kind=PlotKind.LINE,
        series=(
            Series(
                label="e-process",
                x=tuple(places),
                y=tuple(end * (place / 20_000) ** 1.2 + 0.6 * math.sin(place / 900) for place in places),
            ),
            Series(label="fails from here", x=(0.0, 20_000.0), y=(7.3, 7.3), dashed=True),
        ),
        caption="Falling or flat: no evidence against the target. Rising to the dashed line: proof.",
    )


def qq(bend: float) -> Plot:
    grid = [step / 50 for step in range(51)]
    return Plot(
        id="lossless/qq",
        title="PIT values of the emitted tokens",
        x_label="uniform quantile",
        y_label="observed quantile",
        kind=PlotKind.LINE,
        series=(
            Series(label="all tokens", x=tuple(grid), y=tuple(x**bend for x in grid)),
            Series(label="accepted drafts", x=tuple(grid), y=tuple(x ** (1 + 1.6 * (bend - 1)) for x in grid)),
            Series(label="the target's law", x=(0.0, 1.0), y=(0.0, 1.0), dashed=True),
        ),
        caption="Lines on the diagonal: the tokens follow the target. A bend shows where they don't.",
    )


def by_domain() -> Plot:
    return Plot(
        id="acceptance/domain",
        title="Expected acceptance by domain",
        x_label="domain",
        y_label="Σ min(p, q)",
        kind=PlotKind.BAR,
        series=(
            Series(
                label="this draft",
                x=("prose", "code", "other languages", "templates", "control tokens", "repetition"),
                y=(0.74, 0.81, 0.52, 0.88, 0.41, 0.93),
                low=(0.72, 0.78, 0.47, 0.85, 0.33, 0.91),
                high=(0.76, 0.84, 0.57, 0.91, 0.49, 0.95),
            ),
            Series(label="wanted", x=(-0.5, 5.5), y=(0.6, 0.6), dashed=True),
        ),
        caption="Whiskers are 95 % intervals, clustered by prompt. Bars that end left of the dashed line are too low.",
    )


def by_position() -> Plot:
    return Plot(
        id="acceptance/position",
        title="Accepted drafts by position",
        x_label="position in the block",
        y_label="share accepted",
        kind=PlotKind.STEP,
        series=(
            Series(
                label="accepted",
                x=(1.0, 2.0, 3.0),
                y=(0.78, 0.61, 0.47),
                low=(0.77, 0.59, 0.45),
                high=(0.79, 0.63, 0.49),
            ),
        ),
        caption="Each position counts only blocks in which the ones before it were accepted.",
    )


def lossless() -> CheckResult:
    return CheckResult(
        id="lossless",
        claim="sampled tokens follow the target's distribution, over real prompts",
        verdict=Verdict.FAIL,
        summary="stream: evidence 10^11.8 to 1 against the claim (fails from 10^7.3); 20,000 tokens, TV distance 0.031",
        findings=(
            Finding(text="id 1042 ' the': observed 812 times, expected 611.3", place="worst token"),
            Finding(text=f"the text of this prompt is {HOSTILE}", place="prompt code-07, token 3"),
            Finding(text="x" * 9_000, place="prompt long-01"),
            Finding(text="12 tokens after an early stop were left out", severity=Verdict.INCONCLUSIVE),
        ),
        tests=(
            StatisticalTest(
                name="stream: e-process", statistic=11.8, log10_e=11.8, allowed=7.3, failed=True, num_samples=20_000,
                smallest_detectable=0.012,
            ),
            StatisticalTest(
                name="stream: PIT, Kolmogorov-Smirnov", statistic=0.0412, p_value=3.1e-9, allowed=5e-8, failed=True,
                num_samples=20_000, smallest_detectable=0.018,
            ),
            StatisticalTest(
                name="first token | prompt 2: G statistic", statistic=61.2, p_value=0.37, allowed=6.2e-8, failed=False,
                num_samples=2_000, smallest_detectable=0.06,
            ),
        ),
        measurements={"num_drafted_tokens": 41_220, "log10_e": 11.8, "tv": float("nan"), "worst": HOSTILE},
        num_samples=20_000,
        smallest_detectable=0.012,
        effect_unit="TV distance (mean over tokens, in a tested order)",
        advice="run specverify qualify on this engine: if it fails there too, the rule itself is wrong",
        reproduce="specverify certify pair/ --only lossless --seed 17",
        plots=(e_process(11.8), qq(1.16)),
        elapsed_s=412.7,
    )  # fmt: skip


def quiet_checks() -> tuple[CheckResult, ...]:
    near_tie = Finding(
        text="gap 0.0004 logits, allowed 0.0011", place="prompt 12, token 40", severity=Verdict.INCONCLUSIVE
    )
    return (
        CheckResult(
            id="compatibility", claim="draft and target share tokenizer, ids and output space", verdict=Verdict.PASS,
            summary="49,152 ids, all the same; 3 padding rows can't be emitted", num_samples=49_152, sample_unit="ids",
            elapsed_s=0.8, reproduce="specverify certify pair/ --only compatibility",
        ),
        CheckResult(
            id="exactness", claim="the rule and the decode loop emit the target's law, exactly, on small tables",
            verdict=Verdict.PASS, summary="24 pairs of tables, every path: largest TV distance 2e-16 (allowed 1e-12)",
            measurements={"largest_tv": 2.2e-16, "num_instances": 24}, num_samples=24, sample_unit="exact laws",
            smallest_detectable=1e-12, effect_unit="TV distance", elapsed_s=6.1, advice="nothing",
        ),
        CheckResult(
            id="greedy", claim="at temperature 0 speculation changes no token", verdict=Verdict.INCONCLUSIVE,
            summary="32 prompts, no wrong token; 5 near-ties could not be told from numerical noise",
            findings=(near_tie,),
            measurements={"num_flips": 5, "allowed_gap_logits": 0.0011}, num_samples=1_536, smallest_detectable=0.0011,
            effect_unit="logits", advice="run it in float32, where near-ties are rarer", elapsed_s=31.0,
            reproduce="specverify certify pair/ --only greedy --dtype float32",
        ),
        CheckResult(
            id="acceptance", claim="the draft's tokens are accepted often enough", verdict=Verdict.PASS,
            summary="Σ min(p, q) = 0.734 [0.721, 0.747], wanted 0.6", num_samples=41_220,
            plots=(by_domain(), by_position()),
            measurements={"acceptance_rate": 0.734, "mean_acceptance_length_tokens": 2.86}, elapsed_s=20.4,
        ),
        CheckResult(
            id="cost", claim="speculation pays", verdict=Verdict.NOT_RUN, summary="the plan left it out",
            measurements={"peak_memory_bytes": 5_368_709_120, "decode_ms": float("inf")},
        ),
    )  # fmt: skip


def sample() -> Certificate:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    target = ModelFingerprint(
        name="SmolLM2-1.7B-Instruct", architecture="LlamaForCausalLM", num_parameters=1_711_376_384, vocab_size=49_152,
        weights_sha256=digest, tokenizer_sha256=digest, template_sha256=digest, config_sha256=digest,
        files={"config.json": digest, "model.safetensors": digest},
    )  # fmt: skip
    return Certificate(
        created="2026-03-02T09:41:07+00:00",
        command="specverify certify pair/ --budget standard",
        verdict=Verdict.FAIL,
        headline="Do not roll this out: lossless failed.",
        target=target,
        draft=replace(target, name="SmolLM2-135M-Instruct", num_parameters=134_515_008),
        engine="openai: vLLM 0.11.2 at localhost:8000",
        environment=Environment(
            specverify="0.1.0", python="3.11.7", torch="2.8.0", transformers="4.57.1", device="cuda: NVIDIA H200",
            dtype="bfloat16", num_threads=16, platform="Linux-6.1-x86_64", cpu="x86_64",
        ),
        plan={"budget": "standard", "params": {"temperature": 1.0, "stop_strings": ("\n\n",)}, "limit": math.inf},
        plan_sha256=digest,
        seed=17,
        checks=(*quiet_checks()[:2], lossless(), *quiet_checks()[2:]),
        error_budget=ErrorBudget(
            false_fail_rate=1e-6, e_process_rate=5e-7, p_value_rate=5e-7, num_e_processes=10, num_p_values=14
        ),
        elapsed_s=611.2,
    )  # fmt: skip


@pytest.fixture(scope="session")
def certificate() -> Certificate:
    return sample()


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE
