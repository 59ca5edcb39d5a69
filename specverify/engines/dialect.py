"""What each server calls the same things: bodies of requests, and what their answers mean.

A field that a dialect has no name for is not in its `parameters`, so nobody asks for it. Values that a server would take from
the model's own generation configuration are always sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specverify.engines import ALL_PARAMETERS, Capability
from specverify.errors import RequestRefused, SubjectError
from specverify.records import DecodeCounters, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specverify.records import DecodeRequest

__all__ = ["DIALECTS", "Answer", "Ask", "Dialect", "read_counters"]

_BAN = -100
"""Added to a banned token's logit: the most that servers take, and e^-100 of a probability."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One call: some samples of one request."""

    request: DecodeRequest
    first_sample: int
    num_samples: int
    seed: int | None
    """32 bits, made from the request's seed and the first sample; None lets the server choose."""
    model: str
    model_eos_ids: frozenset[int]
    """Ids at which the model's own configuration ends a text."""
    text: str = ""
    """The prompt, for a dialect that takes no ids."""
    logprobs: bool = True


@dataclass(frozen=True)
class Answer:
    """One sample."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of server is asked."""

    name: str
    path: str
    payload: Callable[[Ask], dict[str, Any]]
    answers: Callable[[Ask, Any], list[Answer]]
    parameters: frozenset[str]
    capabilities: frozenset[Capability]
    most_samples: int = 1
    """Of one call."""
    takes_ids: bool = True
    needs_model: bool = False
    rescored: Callable[[Ask, Sequence[int], int], dict[str, Any]] | None = None
    """The body that asks for the log-probabilities of some ids after a prompt, and of so many likeliest beside each."""
    laws: Callable[[Any, int], list[dict[int, float]]] | None = None
    """What its answer says of each id from a position on."""


def part(answer: Any, *path: str | int) -> Any:  # noqa: ANN401 - JSON of somebody else
    """What stands at a path of an answer; `SubjectError` where it doesn't."""
    for at in path:
        try:
            answer = answer[at]
        except (KeyError, IndexError, TypeError) as error:
            msg = f"the answer has no {'.'.join(map(str, path))}"
            raise SubjectError(msg) from error
    return answer


def _ids(values: Any) -> tuple[int, ...]:  # noqa: ANN401 - as above
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        msg = "the answer's token ids are no list of integers"
        raise SubjectError(msg)
    return tuple(values)


def _logprobs(values: Any) -> tuple[float, ...]:  # noqa: ANN401 - as above
    """As told; what is no number is NaN, for the check of log-probabilities to find."""
    told = values if isinstance(values, list) else []
    return tuple(float(value) if isinstance(value, (int, float)) else float("nan") for value in told)


def _finish(ask: Ask, reasons: dict[str, FinishReason], reason: Any, token_ids: Sequence[int]) -> FinishReason:  # noqa: ANN401 - as above
    """The server's word, but for which stop it was: an EOS id among the stop ids is an EOS."""
    if reason not in reasons:
        msg = f"the text ended with {reason!r}"
        raise SubjectError(msg)
    finish = reasons[reason]
    ended_by = token_ids[-1] if token_ids else None
    if finish is FinishReason.LENGTH:
        return finish
    if ended_by in ask.request.params.eos_token_ids:
        return FinishReason.EOS
    return FinishReason.STOP if ended_by in ask.request.params.stop_token_ids else finish


def _single_bans(ask: Ask) -> list[int]:
    if any(len(ids) > 1 for ids in ask.request.params.banned_token_ids):
        msg = "banned sequences of several ids have no name in this dialect"
        raise RequestRefused(msg)
    return [ids[0] for ids in ask.request.params.banned_token_ids]


def _endings(ask: Ask) -> dict[str, Any]:
    """Where a text ends. The model's own EOS where it is the one that is asked for; else all ids as stop ids."""
    params = ask.request.params
    own = frozenset(params.eos_token_ids) == ask.model_eos_ids and bool(ask.model_eos_ids)
    ids = params.stop_token_ids if own else (*params.eos_token_ids, *params.stop_token_ids)
    return {"ignore_eos": not own, "stop_token_ids": list(ids), "stop": list(params.stop_strings)}


# ------------------------------------------------------------------------------------------------------------- vLLM


def _vllm_payload(ask: Ask) -> dict[str, Any]:
    params = ask.request.params
    return {
        "model": ask.model,
        "prompt": list(ask.request.prompt_ids),
        "n": ask.num_samples,
        "seed": ask.seed,
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): _BAN for token in _single_bans(ask)} or None,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "logprobs": 0 if ask.logprobs else None,
        **_endings(ask),
    }


def _vllm_answers(ask: Ask, body: Any) -> list[Answer]:  # noqa: ANN401 - as above
    reasons = {"length": FinishReason.LENGTH, "stop": FinishReason.STOP}
    answers = []
    for choice in sorted(part(body, "choices"), key=lambda choice: int(part(choice, "index"))):
        ids = _ids(part(choice, "token_ids"))
        finish = _finish(ask, reasons, part(choice, "finish_reason"), ids)
        if finish is FinishReason.STOP and choice.get("stop_reason") is None:
            finish = FinishReason.EOS  # its own EOS needs no reason
        answers.append(Answer(ids, finish, _logprobs((choice.get("logprobs") or {}).get("token_logprobs"))))
    return answers


def _vllm_rescored(ask: Ask, ids: Sequence[int], top: int) -> dict[str, Any]:
    prompt = [*ask.request.prompt_ids, *ids]
    return {
        "model": ask.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top,
        "add_special_tokens": False,
    }  # fmt: skip


def _vllm_laws(body: Any, start: int) -> list[dict[int, float]]:  # noqa: ANN401 - as above
    told = part(body, "choices", 0, "prompt_logprobs")
    try:
        return [{int(token): float(each["logprob"]) for token, each in law.items()} for law in told[start:]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = "the answer's prompt_logprobs are no log-probabilities by id"
        raise SubjectError(msg) from error


# ----------------------------------------------------------------------------------------------------------- SGLang


def _sglang_payload(ask: Ask) -> dict[str, Any]:
    params = ask.request.params
    return {
        "input_ids": list(ask.request.prompt_ids),
        "return_logprob": ask.logprobs,
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": params.min_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "logit_bias": {str(token): _BAN for token in _single_bans(ask)} or None,
            "sampling_seed": ask.seed,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **_endings(ask),
        },
    }


def _sglang_answers(ask: Ask, body: Any) -> list[Answer]:  # noqa: ANN401 - as above
    body = body[0] if isinstance(body, list) and body else body
    ids = _ids(part(body, "output_ids"))
    reason = part(body, "meta_info", "finish_reason")
    reasons = {"length": FinishReason.LENGTH, "stop": FinishReason.STOP}
    finish = _finish(ask, reasons, part(reason, "type"), ids)
    if finish is FinishReason.STOP and ids and ids[-1] in ask.model_eos_ids and reason.get("matched") == ids[-1]:
        finish = FinishReason.EOS
    told = part(body, "meta_info").get("output_token_logprobs") or []
    return [Answer(ids, finish, _logprobs([entry[0] for entry in told]))]


# --------------------------------------------------------------------------------------------------------- llama.cpp


def _llamacpp_payload(ask: Ask) -> dict[str, Any]:
    """Samplers in the order of transformers. Its `ignore_eos` bans EOS instead of ignoring it, so it is not used."""
    params = ask.request.params
    if not frozenset(params.eos_token_ids) <= ask.model_eos_ids:
        msg = "llama.cpp ends a text at the model's own EOS alone"
        raise RequestRefused(msg)
    used = {
        "penalties": params.repetition_penalty != 1,
        "temperature": True,
        "top_k": params.top_k > 0,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
    }
    return {
        "prompt": list(ask.request.prompt_ids),
        "n_predict": params.max_new_tokens,
        "seed": -1 if ask.seed is None else ask.seed,
        "samplers": [name for name, wanted in used.items() if wanted],
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": len(ask.request.prompt_ids) + params.max_new_tokens,  # all there is
        "logit_bias": [[token, False] for token in _single_bans(ask)],
        "stop": list(params.stop_strings),
        "n_probs": 1 if ask.logprobs else 0,
        "return_tokens": True,
        "cache_prompt": True,  # its default; a fault of the prefix cache is a fault
    }


def _llamacpp_answers(ask: Ask, body: Any) -> list[Answer]:  # noqa: ANN401 - as above
    ids = _ids(part(body, "tokens"))
    reasons = {"limit": FinishReason.LENGTH, "eos": FinishReason.EOS, "word": FinishReason.STOP}
    finish = _finish(ask, reasons, part(body, "stop_type"), ids)
    told = body.get("completion_probabilities") or []
    return [Answer(ids, finish, _logprobs([part(entry, "logprob") for entry in told]))]


# -------------------------------------------------------------------------------------------------------------- TGI


def _tgi_payload(ask: Ask) -> dict[str, Any]:
    """It refuses values that switch a parameter off, so those are left out."""
    params = ask.request.params
    if frozenset(params.eos_token_ids) - ask.model_eos_ids:
        msg = "TGI ends a text at the model's own EOS alone"
        raise RequestRefused(msg)
    its: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "do_sample": not params.greedy,
        "seed": ask.seed,
        "stop": list(params.stop_strings),
        "details": True,
        "return_full_text": False,
    }
    if not params.greedy:
        its |= {"temperature": params.temperature}
        its |= {"top_k": params.top_k} if params.top_k else {}
        its |= {"top_p": params.top_p} if params.top_p < 1 else {}
    if params.repetition_penalty != 1:
        its["repetition_penalty"] = params.repetition_penalty
    return {"inputs": ask.text, "parameters": its}


def _tgi_answers(ask: Ask, body: Any) -> list[Answer]:  # noqa: ANN401 - as above
    body = body[0] if isinstance(body, list) and body else body
    tokens = part(body, "details", "tokens")
    ids = _ids([part(token, "id") for token in tokens])
    reasons = {"length": FinishReason.LENGTH, "eos_token": FinishReason.EOS, "stop_sequence": FinishReason.STOP}
    finish = _finish(ask, reasons, part(body, "details", "finish_reason"), ids)
    return [Answer(ids, finish, _logprobs([token.get("logprob") for token in tokens]))]


_COMMON = frozenset({"temperature", "top_k", "top_p", "repetition_penalty", "eos_token_ids"})
_SERVER = frozenset(
    {Capability.STOP_STRINGS, Capability.LOGPROBS, Capability.UNSEEDED, Capability.STREAM, Capability.SCHEMA}
)

DIALECTS: dict[str, Dialect] = {
    "vllm": Dialect(
        name="vllm",
        path="/v1/completions",
        payload=_vllm_payload,
        answers=_vllm_answers,
        parameters=ALL_PARAMETERS - {"no_repeat_ngram_size"},
        capabilities=_SERVER | {Capability.SEED, Capability.COUNTERS, Capability.PROMPT_LOGPROBS},
        most_samples=128,
        needs_model=True,
        rescored=_vllm_rescored,
        laws=_vllm_laws,
    ),
    "sglang": Dialect(
        name="sglang",
        path="/generate",
        payload=_sglang_payload,
        answers=_sglang_answers,
        parameters=ALL_PARAMETERS - {"no_repeat_ngram_size"},
        capabilities=_SERVER,  # seeds need --enable-deterministic-inference; its metrics are averages, not counters
    ),
    "llamacpp": Dialect(
        name="llamacpp",
        path="/completion",
        payload=_llamacpp_payload,
        answers=_llamacpp_answers,
        parameters=_COMMON | {"min_p", "banned_token_ids"},
        capabilities=_SERVER | {Capability.SEED, Capability.COUNTERS},
    ),
    "tgi": Dialect(
        name="tgi",
        path="/generate",
        payload=_tgi_payload,
        answers=_tgi_answers,
        parameters=_COMMON,
        capabilities=_SERVER | {Capability.SEED},
        takes_ids=False,
    ),
}
"""By the name of the server."""

# --------------------------------------------------------------------------------------------------------- counters

_SAMPLE = re.compile(r"^\w+:spec_decode_(num_\w+?)_total(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def read_counters(metrics: str) -> DecodeCounters:
    """The counters of a Prometheus page of vLLM or llama.cpp; zeros where it has none, as without speculation."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "num_accepted_tokens_per_pos":
            at = int(found[1]) if (found := _POSITION.search(labels)) else 0
            positions[at] = positions.get(at, 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    return DecodeCounters(
        num_drafts=totals.get("num_drafts", 0),
        num_draft_tokens=totals.get("num_draft_tokens", 0),
        num_accepted_tokens=totals.get("num_accepted_tokens", 0),
        num_accepted_tokens_per_pos=tuple(positions.get(at, 0) for at in range(max(positions, default=-1) + 1)),
    )
