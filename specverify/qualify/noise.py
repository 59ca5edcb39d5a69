"""Random numbers that were not drawn yet, as tensors: what they are functions of, and how two of them are compared.

An element is scale · f(U) + shift of one uniform U, where f is the identity, E = -log U (an exponential), 1/E or log E; or
of a pick, the not yet decided outcome of a draw. Indexing, reshaping, stacking and affine arithmetic keep that form, so
code that was written for real tensors runs unchanged until it compares, races or picks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

import torch

from specverify.qualify.paths import NotFollowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Form", "Noise", "Number", "affine", "broadcast", "clamped", "combined", "race_weights", "threshold"]

NEGLIGIBLE = 1e-6
"""A guard against log(0) or a division by 0; it moves a probability by no more."""


class Form(Enum):
    """What f is."""

    UNIFORM = "U"
    EXPONENTIAL = "-log U"
    RECIPROCAL = "1 / -log U"
    LOGARITHM = "log(-log U)"
    PICK = "the outcome of a draw"


class Noise(torch.Tensor):
    """A tensor of random numbers that were not drawn; its own values are NaN or 0, and nobody reads them."""

    handles: Tensor
    """Which uniform, or which draw; -1 where the element is no random number (its scale is 0)."""
    scale: Tensor
    shift: Tensor
    form: Form
    cast: torch.dtype
    """The dtype that the function under test sees."""

    @classmethod
    def made(cls, handles: Tensor, form: Form, dtype: torch.dtype, parts: tuple[Tensor, Tensor] | None = None) -> Noise:
        """A tensor of that shape; `parts` are scale and shift, 1 and 0 unless given."""
        blank = torch.zeros(handles.shape, dtype=dtype)
        if dtype.is_floating_point:
            blank.fill_(math.nan)
        noise = blank.as_subclass(cls)
        noise.handles, noise.form, noise.cast = handles, form, dtype
        noise.scale, noise.shift = parts or (
            torch.ones(handles.shape, dtype=torch.float64),
            torch.zeros(handles.shape, dtype=torch.float64),
        )
        return noise

    def become(self, other: Noise) -> Noise:
        """Hold what `other` holds: an in-place operation."""
        self.handles, self.scale, self.shift, self.form = other.handles, other.scale, other.shift, other.form
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: Sequence[type], args: object = (), kwargs: object = None
    ) -> NoReturn:
        """Only `lazy.Following` knows what to do with it."""
        del types, args, kwargs
        msg = f"random numbers reached {getattr(func, '__name__', func)} after the call had ended"
        raise NotFollowed(msg)


@dataclass(frozen=True, eq=False)
class Number:
    """A Python float that was not drawn: what `.item()` and `.tolist()` give."""

    noise: Tensor
    """A scalar."""

    def __lt__(self, other: float | Tensor) -> bool:
        return bool(self.noise < other)

    def __le__(self, other: float | Tensor) -> bool:
        return bool(self.noise <= other)

    def __gt__(self, other: float | Tensor) -> bool:
        return bool(self.noise > other)

    def __ge__(self, other: float | Tensor) -> bool:
        return bool(self.noise >= other)

    def __mul__(self, other: float | Tensor) -> Number:
        return Number(self.noise * other)

    def __add__(self, other: float | Tensor) -> Number:
        return Number(self.noise + other)

    def __sub__(self, other: float | Tensor) -> Number:
        return Number(self.noise - other)

    def __rsub__(self, other: float | Tensor) -> Number:
        return Number(other - self.noise)

    def __truediv__(self, other: float | Tensor) -> Number:
        return Number(self.noise / other)

    __rmul__, __radd__ = __mul__, __add__

    def __float__(self) -> NoReturn:
        """A number can't stand for all of them. Raises `NotFollowed`."""
        msg = "a random number is turned into a Python float"
        raise NotFollowed(msg)


# ---------------------------------------------------------------------------------------------- arithmetic


def broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in one shape."""
    return tuple(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]  # torch leaves it so


def affine(noise: Noise, factor: Tensor, term: Tensor, dtype: torch.dtype) -> Noise:
    """Factor · noise + term, broadcast."""
    parts = (noise.handles, noise.scale, noise.shift, factor.double(), term.double())
    handles, scale, shift, factor, term = broadcast(*parts)
    return Noise.made(handles, noise.form, dtype, (scale * factor, shift * factor + term))


def _require_bare(noise: Noise, operation: str) -> None:
    if bool((noise.shift.abs() > NEGLIGIBLE).any()) or bool((noise.handles < 0).any()):
        msg = f"{operation} of random numbers that something was added to"
        raise NotFollowed(msg)


def reciprocal(noise: Noise, dtype: torch.dtype) -> Noise:
    """1 / noise, for exponentials and their reciprocals."""
    _require_bare(noise, "a reciprocal")
    forms = {Form.EXPONENTIAL: Form.RECIPROCAL, Form.RECIPROCAL: Form.EXPONENTIAL}
    if noise.form not in forms:
        msg = f"a division by random numbers of the form {noise.form.value}"
        raise NotFollowed(msg)
    return Noise.made(noise.handles, forms[noise.form], dtype, (1 / noise.scale, torch.zeros_like(noise.shift)))


def logarithm(noise: Noise, dtype: torch.dtype) -> Noise:
    """Log of a uniform, of an exponential times a number, or of its reciprocal."""
    _require_bare(noise, "a logarithm")
    zeros, ones = torch.zeros_like(noise.scale), torch.ones_like(noise.scale)
    if noise.form is Form.UNIFORM and bool((noise.scale == 1).all()):
        return Noise.made(noise.handles, Form.EXPONENTIAL, dtype, (-ones, zeros))
    if noise.form is Form.EXPONENTIAL and bool((noise.scale > 0).all()):
        return Noise.made(noise.handles, Form.LOGARITHM, dtype, (ones, noise.scale.log()))
    if noise.form is Form.RECIPROCAL:
        return Noise.made(noise.handles, Form.LOGARITHM, dtype, (-ones, noise.scale.log()))
    msg = f"a logarithm of random numbers of the form {noise.form.value}"
    raise NotFollowed(msg)


# ---------------------------------------------------------------------------------------------- decisions


def threshold(form: Form, bound: float) -> tuple[float, bool]:
    """Where U stands when f(U) = bound, and whether f(U) rises with U."""
    if form is Form.UNIFORM:
        return bound, True
    if form is Form.EXPONENTIAL:
        return math.exp(-bound) if bound > -700 else math.inf, False
    if form is Form.RECIPROCAL:
        return (math.exp(-1 / bound) if bound > 0 else -math.inf), True
    if form is Form.LOGARITHM:
        return math.exp(-math.exp(bound)) if bound < 700 else 0.0, False
    msg = "the outcome of a draw has no threshold"
    raise NotFollowed(msg)


def race_weights(noise: Noise, *, largest: bool) -> Tensor:
    """How likely each element is to win, up to a factor [Daliri2024]: w for E/w smallest. Raises `NotFollowed`."""
    scale, shift = noise.scale, noise.shift
    if noise.form is Form.RECIPROCAL and largest:
        _require_bare(noise, "a race")
        return scale
    if noise.form is Form.EXPONENTIAL:
        _require_bare(noise, "a race")
        weights = 1 / (-scale if largest else scale)
        if bool((weights >= 0).all()):
            return weights.nan_to_num(nan=0.0)
    if noise.form is Form.LOGARITHM and bool((scale == (-1 if largest else 1)).all()):
        utility = shift if largest else -shift
        return (utility - utility.amax(-1, keepdim=True)).exp()
    msg = f"the {'largest' if largest else 'smallest'} of random numbers of the form {noise.form.value}"
    raise NotFollowed(msg)


def combined(operation: str, first: Tensor | float, second: Tensor | float | None, dtype: torch.dtype) -> Noise:
    """First (operation) second, one of them noise. Raises `NotFollowed` for what keeps no form."""
    if isinstance(first, Noise) and not isinstance(second, Noise):
        other = torch.as_tensor(0.0 if second is None else second, dtype=torch.float64)
        if operation in _OF_NOISE:
            return _OF_NOISE[operation](first, other, dtype)
    elif isinstance(second, Noise) and not isinstance(first, Noise) and operation in _BY_NOISE:
        return _BY_NOISE[operation](second, torch.as_tensor(first, dtype=torch.float64), dtype)
    msg = f"random numbers go into torch's {operation}"
    raise NotFollowed(msg)


_ONE, _NOTHING = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
_Operation = Callable[["Noise", "Tensor", torch.dtype], "Noise"]

_OF_NOISE: dict[str, _Operation] = {
    "add": lambda noise, other, dtype: affine(noise, _ONE, other, dtype),
    "sub": lambda noise, other, dtype: affine(noise, _ONE, -other, dtype),
    "mul": lambda noise, other, dtype: affine(noise, other, _NOTHING, dtype),
    "div": lambda noise, other, dtype: affine(noise, 1 / other, _NOTHING, dtype),
    "neg": lambda noise, _, dtype: affine(noise, -_ONE, _NOTHING, dtype),
    "reciprocal": lambda noise, _, dtype: reciprocal(noise, dtype),
    "log": lambda noise, _, dtype: logarithm(noise, dtype),
}
_BY_NOISE: dict[str, _Operation] = {
    "add": _OF_NOISE["add"],
    "mul": _OF_NOISE["mul"],
    "sub": lambda noise, other, dtype: affine(noise, -_ONE, other, dtype),
    "div": lambda noise, other, dtype: affine(reciprocal(noise, dtype), other, _NOTHING, dtype),
}


def clamped(noise: Noise, low: float | None, high: float | None) -> Noise:
    """The same noise: a clamp that only keeps it from the ends of its range. Raises `NotFollowed` for any other."""
    top = 1 - NEGLIGIBLE if noise.form is Form.UNIFORM else math.inf
    if (low is None or low <= NEGLIGIBLE) and (high is None or high >= top):
        return noise
    msg = f"random numbers are clamped to [{low}, {high}]"
    raise NotFollowed(msg)
