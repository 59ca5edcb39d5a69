"""Which torch operations do what to random numbers that were not drawn, and how the arguments of one are walked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from specverify.qualify.noise import Form, Noise
from specverify.qualify.paths import NotFollowed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CASTS",
    "COMPARISONS",
    "MIRRORED",
    "MOVES",
    "PLAIN",
    "SYNONYMS",
    "UNKNOWN_DRAWS",
    "Anything",
    "Arguments",
    "Named",
    "any_noise",
    "blank",
    "mapped",
    "name_of",
    "noises_in",
    "on_parts",
    "picks",
]

Anything: TypeAlias = Any  # what the function under test hands to torch, and gets from it
Arguments: TypeAlias = tuple[Anything, ...]
Named: TypeAlias = dict[str, Anything]

PLAIN = frozenset(
    [
        "__get__",
        "dim",
        "size",
        "numel",
        "is_contiguous",
        "stride",
        "storage_offset",
        "__len__",
        "is_floating_point",
        "element_size",
        "nelement",
        "get_device",
        "ndimension",
        "is_complex",
        "__hash__",
        "is_same_size",
    ]
)
"""Answered by the shape and dtype alone."""
MOVES = frozenset(
    [
        "__getitem__",
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "clone",
        "contiguous",
        "detach",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "stack",
        "cat",
        "concat",
        "gather",
        "index_select",
        "select",
        "narrow",
        "unbind",
        "split",
        "chunk",
        "repeat",
        "repeat_interleave",
        "flip",
        "roll",
        "masked_select",
        "take_along_dim",
        "swapaxes",
        "movedim",
        "ravel",
        "broadcast_to",
        "view_as",
        "reshape_as",
        "hstack",
        "vstack",
        "take",
        "where",
    ]
)
"""Elements move and stay what they are."""
CASTS = frozenset(
    [
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "cpu",
        "cuda",
        "int",
        "long",
        "requires_grad_",
        "detach_",
    ]
)
COMPARISONS = {
    "lt": (True, False), "less": (True, False), "le": (True, True), "less_equal": (True, True),
    "gt": (False, True), "greater": (False, True), "ge": (False, False), "greater_equal": (False, False),
}  # fmt: skip
"""Whether it asks for `below`, and whether the threshold itself counts as below."""
MIRRORED = {"lt": "gt", "less": "gt", "le": "ge", "less_equal": "ge"} | {
    "gt": "lt", "greater": "lt", "ge": "le", "greater_equal": "le"
}  # fmt: skip
UNKNOWN_DRAWS = frozenset(
    [
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "normal",
        "normal_",
        "random_",
        "poisson",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "binomial",
        "dropout",
        "gumbel_softmax",
    ]
)
SYNONYMS = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
}


def name_of(func: Callable[..., object]) -> str:
    """What torch calls the operation."""
    return getattr(func, "__name__", "")


def mapped(change: Callable[[Anything], Anything], value: Anything) -> Anything:
    """`value` with everything inside its tuples, lists and dicts changed."""
    if isinstance(value, dict):
        return {key: mapped(change, each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(change, each) for each in value)
    return change(value)


def noises_in(value: Anything) -> list[Noise]:
    """Every `Noise` inside the arguments."""
    found: list[Noise] = []
    mapped(lambda each: found.append(each) if isinstance(each, Noise) else None, value)
    return found


def any_noise(value: Anything) -> bool:
    """Whether a random number that was not drawn is inside."""
    return bool(noises_in(value))


def blank(value: Anything) -> Anything:
    """A real tensor of the same shape and dtype."""
    return torch.zeros(value.handles.shape, dtype=value.cast) if isinstance(value, Noise) else value


def picks(draws: list[int], shape: tuple[int, ...]) -> Noise:
    """Ids whose draws are not decided yet, in that shape."""
    return Noise.made(torch.tensor(draws, dtype=torch.int64).reshape(shape), Form.PICK, torch.int64)


def on_parts(func: Callable[..., Anything], args: Arguments, kwargs: Named) -> Anything:
    """The same move of handles, scales and shifts; a real tensor among them is a shift without a random number."""
    noises = noises_in((args, kwargs))
    if len({noise.form for noise in noises}) > 1:
        msg = f"random numbers of different forms meet in {name_of(func)}"
        raise NotFollowed(msg)
    if name_of(func) == "where":
        args = tuple(torch.as_tensor(each) if isinstance(each, int | float) else each for each in args)
    mixes = name_of(func) in ("stack", "cat", "concat", "hstack", "vstack", "where")

    def part(name: str) -> Callable[[Anything], Anything]:
        def of(value: Anything) -> Anything:
            if isinstance(value, Noise):
                return getattr(value, name)
            if not mixes or not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
                return value
            fill = {"handles": -1, "scale": 0.0}
            return value.double() if name == "shift" else torch.full(value.shape, fill[name])

        return of

    moved = [func(*mapped(part(name), args), **mapped(part(name), kwargs)) for name in ("handles", "scale", "shift")]
    dtype, form = noises[0].cast, noises[0].form
    if isinstance(moved[0], torch.Tensor):
        return Noise.made(moved[0], form, dtype, (moved[1], moved[2]))
    return tuple(Noise.made(each, form, dtype, (scale, shift)) for each, scale, shift in zip(*moved, strict=True))
