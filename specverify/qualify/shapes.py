"""Call shapes: how functions of different projects are asked to verify drafts, and how their answers read.

`docs/qualify.md` has an example of each, which a test runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from specverify.errors import PlanError, SubjectError
from specverify.verification import Proposal

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from specverify.qualify.randomness import Randomness

__all__ = ["SHAPES", "Shape", "Step", "detect", "find_shape"]

Function = Callable[..., Any]
Rows = list[list[int]]


@dataclass(frozen=True)
class Step:
    """What a function is asked: drafts, the laws that they were drawn from, the target's laws, and randomness."""

    token_ids: Int[Tensor, "batch k"]
    num_draft_tokens: Int[Tensor, " batch"]
    draft_probs: Float[Tensor, "batch k vocab"]
    target_probs: Float[Tensor, "batch k_plus_1 vocab"]
    randomness: Randomness
    deterministic: bool = False
    """The draft drew nothing: its laws are point masses, which some functions are told as None."""

    def row(self, place: int) -> Step:
        """That row alone."""
        at = slice(place, place + 1)
        return replace(
            self,
            token_ids=self.token_ids[at],
            num_draft_tokens=self.num_draft_tokens[at],
            draft_probs=self.draft_probs[at],
            target_probs=self.target_probs[at],
        )

    @property
    def drafted(self) -> Tensor:
        """Which padded places hold a draft."""
        return torch.arange(self.token_ids.shape[1]) < self.num_draft_tokens[:, None]


@dataclass(frozen=True)
class Shape:
    """One way of calling a verifier."""

    name: str
    signature: str
    """As it is printed."""
    matches: Callable[[tuple[str, ...]], bool]
    """Whether parameters of these names are this shape."""
    call: Callable[[Function, Step], Rows]
    """Emitted ids of each row: accepted drafts, then one more."""
    batched: bool = True
    ragged: bool = True
    """Rows of one call may have different numbers of drafts, 0 too."""
    logits: bool = False
    """It takes log-probabilities."""


def parameters(function: Function) -> tuple[str, ...]:
    """The names of its parameters. Raises `PlanError` where they can't be read."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        msg = f"the parameters of {function!r} can't be read; wrap it in a Python function of one of the shapes"
        raise PlanError(msg) from error


def detect(function: Function) -> Shape:
    """The shape that the parameters' names say. Raises `PlanError` with all shapes where none does."""
    names = parameters(function)
    for shape in SHAPES:
        if shape.matches(names):
            return shape
    known = "; ".join(f"{shape.name}: {shape.signature}" for shape in SHAPES)
    msg = f"({', '.join(names)}) is none of the known call shapes; name one with --shape, or wrap the function as one of: {known}"
    raise PlanError(msg)


def find_shape(name: str) -> Shape:
    """The shape of that name. Raises `PlanError` with the names."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    msg = f"there is no shape named '{name}'; known: {', '.join(shape.name for shape in SHAPES)}"
    raise PlanError(msg)


def _called(function: Function, values: Mapping[str, object], shape: str) -> object:
    """`function` with the values that its parameters are named after; what has a default may be left out."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in values:
            arguments[name] = values[name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            msg = f"the shape {shape} has no value for the parameter '{name}'; give it a default, or wrap the function"
            raise PlanError(msg)
    return function(**arguments)


def _rows(answer: object, batch: int) -> Rows:
    """Ids of each row from a tensor padded with negative ids, or from lists. Raises `SubjectError` for anything else."""
    listed = answer.tolist() if hasattr(answer, "tolist") else answer
    if (
        not isinstance(listed, list | tuple)
        or len(listed) != batch
        or not all(isinstance(row, list | tuple) for row in listed)
    ):
        msg = f"it answered {type(answer).__name__} {str(listed)[:60]}, not {batch} row(s) of ids"
        raise SubjectError(msg)
    rows = []
    for row in listed:
        ids = [int(each) for each in row]
        length = next((place for place, token in enumerate(ids) if token < 0), len(ids))
        if any(token >= 0 for token in ids[length:]):
            msg = f"it answered ids after a padding: {ids}"
            raise SubjectError(msg)
        rows.append(ids[:length])
    return rows


def _counted(rows: Rows, counts: object, what: str) -> Rows:
    """The same rows. Raises `SubjectError` where a reported number of accepted drafts isn't the rows' own."""
    listed = torch.as_tensor(counts).flatten().tolist()
    actual = [len(row) - 1 for row in rows]
    if listed != actual:
        msg = f"its {what} is {listed} where its ids have {actual} accepted drafts before the last token"
        raise SubjectError(msg)
    return rows


# ---------------------------------------------------------------------------------------------- the shapes


def _specverify(function: Function, step: Step) -> Rows:
    proposal = Proposal(step.token_ids, step.num_draft_tokens, step.draft_probs)
    verification = function(proposal, step.target_probs, step.randomness.choices(len(step.token_ids)))
    counts, added = verification.num_accepted_tokens.tolist(), verification.next_token_ids.tolist()
    return [[*ids[:count], token] for ids, count, token in zip(step.token_ids.tolist(), counts, added, strict=True)]


def _transformers(function: Function, step: Step) -> Rows:
    values = {
        "candidate_input_ids": torch.cat((torch.zeros_like(step.token_ids[:, :1]), step.token_ids), 1),
        "candidate_logits": step.draft_probs.log(),
        "candidate_length": step.token_ids.shape[1],
        "new_logits": step.target_probs.log(),
        "is_done_candidate": False,
    }
    ids, count = _pair(_called(function, values, "transformers"))
    return _counted(_rows(ids, len(step.token_ids)), count, "n_matches")


def _vllm(function: Function, step: Step) -> Rows:
    counts = step.num_draft_tokens.tolist()
    last = step.target_probs[torch.arange(len(counts)), step.num_draft_tokens]
    target = step.target_probs[:, :-1][step.drafted]
    values = {
        "draft_token_ids": step.token_ids[step.drafted],
        "num_draft_tokens": counts,
        "max_spec_len": step.token_ids.shape[1],
        "cu_num_draft_tokens": step.num_draft_tokens.cumsum(0),
        "draft_probs": None if step.deterministic else step.draft_probs[step.drafted],
        "target_probs": target,
        "target_logits": target.log(),
        "bonus_token_ids": torch.multinomial(last, 1),  # vLLM's sampler draws them before the call
        "sampling_metadata": SimpleNamespace(
            all_greedy=False,
            all_random=True,
            temperature=torch.ones(len(counts)),
            generators={},
            top_k=None,
            top_p=None,
        ),
    }
    return _rows(_called(function, values, "vllm"), len(counts))


def _flashinfer(function: Function, step: Step) -> Rows:
    values: dict[str, object] = {
        "draft_probs": step.draft_probs,
        "draft_token_ids": step.token_ids.int(),
        "target_probs": step.target_probs,
        "uniform_samples": _uniforms(step, step.token_ids.shape[1] + 1),
    }
    answer = _called(function, values, "flashinfer")
    if not isinstance(answer, tuple) or len(answer) != 3:
        msg = f"it answered {type(answer).__name__}, not (output_token_ids, accepted, emitted)"
        raise SubjectError(msg)
    return _counted(_rows(answer[0], len(step.token_ids)), answer[2], "number of emitted drafts")


def _plain(function: Function, step: Step, *, batched: bool) -> Rows:
    """Every parameter by what its name says; uniforms where it asks for them."""
    values: dict[str, object] = {}
    for name in parameters(function):
        value = _plain_value(name, step)
        if value is not None:
            values[name] = value if batched or not isinstance(value, torch.Tensor) else value[0]
    answer = _called(function, values, "plain")
    if isinstance(answer, tuple) and len(answer) == 2 and not isinstance(answer[0], int):
        ids, count = answer
        return _counted(_rows(ids if batched else [_listed(ids)], len(step.token_ids)), count, "count")
    return _rows(answer if batched else [_listed(answer)], len(step.token_ids))


def _plain_value(name: str, step: Step) -> Tensor | None:
    num_drafts = step.token_ids.shape[1]
    if name in _DRAFT_IDS:
        return step.token_ids
    if name in _DRAFT_LAWS:
        return step.draft_probs
    if name in _TARGET_LAWS:
        return step.target_probs
    if name in ("num_draft_tokens", "draft_lengths"):
        return step.num_draft_tokens
    if "uniform" in name or name in ("u", "us", "r"):
        if "accept" in name:
            return _uniforms(step, num_drafts)
        single = any(word in name for word in ("residual", "sample", "bonus", "recover", "last", "next"))
        return _uniforms(step, 1)[:, 0] if single and "samples" not in name else _uniforms(step, num_drafts + 1)
    return None


def _uniforms(step: Step, count: int) -> Tensor:
    return step.randomness.uniforms((len(step.token_ids), count), step.target_probs.dtype)


def _listed(answer: object) -> object:
    return answer.tolist() if hasattr(answer, "tolist") else answer


def _pair(answer: object) -> tuple[object, object]:
    if not isinstance(answer, tuple) or len(answer) != 2:
        msg = f"it answered {type(answer).__name__}, not (ids, count)"
        raise SubjectError(msg)
    return answer


_DRAFT_IDS = frozenset(("draft_ids", "draft_token_ids", "draft_tokens", "token_ids", "drafts", "x"))
_DRAFT_LAWS = frozenset(("draft_probs", "draft_probabilities", "draft_dists", "q", "draft_p"))
_TARGET_LAWS = frozenset(("target_probs", "target_probabilities", "target_dists", "p", "target_p"))


def _is_plain(names: tuple[str, ...]) -> bool:
    return all(any(name in known for name in names) for known in (_DRAFT_IDS, _DRAFT_LAWS, _TARGET_LAWS))


SHAPES: tuple[Shape, ...] = (
    Shape(
        "specverify",
        "(proposal, target_probs, choices) -> Verification",
        lambda names: {"proposal", "choices"} <= set(names),
        _specverify,
    ),
    Shape(
        "transformers",
        "(candidate_input_ids, candidate_logits, candidate_length, new_logits, ...) -> (valid_tokens, n_matches)",
        lambda names: {"candidate_input_ids", "candidate_logits", "new_logits"} <= set(names),
        _transformers,
        batched=False,
        ragged=False,
        logits=True,
    ),
    Shape(
        "vllm",
        "(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, "
        "bonus_token_ids, sampling_metadata) -> ids [B, g+1] padded with -1",
        lambda names: {"draft_token_ids", "num_draft_tokens", "bonus_token_ids"} <= set(names),
        _vllm,
    ),
    Shape(
        "flashinfer",
        "(draft_probs, draft_token_ids, [uniform_samples], target_probs, ...) -> (ids [B, g+1], accepted, emitted)",
        lambda names: (
            {"draft_probs", "draft_token_ids", "target_probs"} <= set(names)
            and bool({"deterministic", "maybe_output_accepted_token_num", "uniform_samples"} & set(names))
        ),
        _flashinfer,
        ragged=False,
    ),
    Shape(
        "plain",
        "(draft_ids [g], draft_probs [g, V], target_probs [g+1, V], [uniforms [g+1]]) -> ids of one row",
        _is_plain,
        lambda function, step: _plain(function, step, batched=False),
        batched=False,
    ),
    Shape(
        "plain-batch",
        "(draft_ids [B, g], draft_probs [B, g, V], target_probs [B, g+1, V], [uniforms [B, g+1]]) -> ids of each row",
        lambda _: False,
        lambda function, step: _plain(function, step, batched=True),
        ragged=False,
    ),
)
"""In the order in which they are tried; `plain` and `plain-batch` have the same names and are told apart by a call."""
