"""A third party's torch function run as it is, its random numbers left undrawn until it decides something by them.

`Following` is entered around the call. It answers `torch.rand`, `rand_like`, `uniform_`, `exponential_`, `multinomial` and
`bernoulli`, whatever generator they are given, with `Noise`, and forks the path at comparisons, races (the argmax of p/E,
or of log p + Gumbel) and inverse cumulative distributions. An id that is drawn and never looked at is never decided. What
isn't known here raises `NotFollowed`, and the function is sampled instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from specverify.qualify.noise import Form, Noise, Number, affine, broadcast, clamped, combined, race_weights, threshold
from specverify.qualify.operations import (
    CASTS,
    COMPARISONS,
    MIRRORED,
    MOVES,
    PLAIN,
    SYNONYMS,
    UNKNOWN_DRAWS,
    Anything,
    Arguments,
    Named,
    any_noise,
    blank,
    mapped,
    name_of,
    noises_in,
    on_parts,
    picks,
)
from specverify.qualify.paths import NotFollowed, Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Following", "lazy_uniforms", "steps_of"]


def steps_of(dtype: torch.dtype) -> int:
    """How many different uniforms `torch.rand` makes in a dtype."""
    bits: int = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(dtype, 53)
    return 1 << bits


def lazy_uniforms(path: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Noise:
    """Uniforms that were not drawn, of any shape; also what a function that takes uniforms is handed."""
    path.handed_out += torch.Size(shape).numel()
    handles = [path.uniform(steps_of(dtype)) for _ in range(torch.Size(shape).numel())]
    return Noise.made(torch.tensor(handles, dtype=torch.int64).reshape(shape), Form.UNIFORM, dtype)


class Following(TorchFunctionMode):
    """Runs torch code on one path."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._draws: list[tuple[list[int], list[float]]] = []
        self._decided: dict[int, int] = {}
        self._raced: set[int] = set()
        self._held: dict[int, tuple[Tensor, Noise]] = {}
        """Noise that was written into a real tensor's memory, by its address; the tensor is kept alive."""

    def __torch_function__(
        self, func: Callable[..., Anything], types: object, args: Arguments = (), kwargs: Named | None = None
    ) -> Anything:
        """One operation of the function under test."""
        del types
        kwargs = kwargs or {}
        self.path.next_operation()
        name = name_of(func)
        if name in UNKNOWN_DRAWS:
            msg = f"it draws by torch's {name}"
            raise NotFollowed(msg)
        draw = getattr(self, f"_draw_{name.rstrip('_')}", None)
        if draw is not None:
            return draw(func, *args, **kwargs)
        if self._held:
            args, kwargs = mapped(self._as_held, args), mapped(self._as_held, kwargs)
        if not any_noise((args, kwargs)):
            return func(*args, **kwargs)
        return self._of_noise(name, func, args, kwargs)

    # ---------------------------------------------------------------------------------------------- drawing

    def _draw_rand(self, func: Callable[..., Tensor], *args: Anything, **kwargs: Anything) -> Tensor:
        real = func(*args, **kwargs)
        return lazy_uniforms(self.path, tuple(real.shape), real.dtype)

    def _draw_rand_like(self, func: Callable[..., Tensor], like: Tensor, **kwargs: Anything) -> Tensor:
        return self._draw_rand(func, blank(like), **kwargs)

    def _draw_uniform(self, func: object, target: Tensor, *args: float, **kwargs: Anything) -> Tensor:
        del func
        low, high = kwargs.get("from", (*args, 0.0)[0]), kwargs.get("to", (*args, 0.0, 1.0)[1])
        real = blank(target)
        fresh = lazy_uniforms(self.path, tuple(real.shape), real.dtype)
        return self._write(target, affine(fresh, torch.tensor(high - low), torch.tensor(low), real.dtype))

    def _draw_exponential(self, func: object, target: Tensor, lambd: float = 1.0, **kwargs: object) -> Tensor:
        del func, kwargs
        real = blank(target)
        fresh = lazy_uniforms(self.path, tuple(real.shape))
        self.path.coarsest = min(self.path.coarsest, steps_of(real.dtype))  # what it does with them has that precision
        fresh.form = Form.EXPONENTIAL
        return self._write(target, affine(fresh, torch.tensor(1 / lambd), torch.tensor(0.0), real.dtype))

    def _draw_bernoulli(self, func: Callable[..., Tensor], *args: Anything, **kwargs: Anything) -> Tensor:
        in_place = name_of(func).endswith("_")
        first = kwargs.get("p", (*args[1:], 0.5)[0]) if in_place else args[0]
        probs = torch.as_tensor(first).expand(args[0].shape)
        flips = [self.path.fork([1 - p, p]) for p in probs.double().flatten().tolist()]
        result = torch.tensor(flips, dtype=args[0].dtype).reshape(args[0].shape)
        return args[0].copy_(result) if in_place else result

    def _draw_multinomial(
        self, func: Callable[..., Tensor], probs: Tensor, num_samples: int = 1, *args: bool, **kwargs: Anything
    ) -> Tensor:
        rows = probs.double().reshape(-1, probs.shape[-1])
        if not bool(((rows >= 0) & rows.isfinite()).all()) or not bool((rows.sum(-1) > 0).all()):
            return func(probs, num_samples, *args, **kwargs)  # raises what torch raises
        if num_samples > 1 and not (args and args[0]) and not kwargs.get("replacement"):
            msg = "it draws several ids without replacement"
            raise NotFollowed(msg)
        draws = [self._new_draw([], row) for row in rows.tolist() for _ in range(num_samples)]
        return picks(draws, (*probs.shape[:-1], num_samples))

    # ---------------------------------------------------------------------------------------------- operations

    def _of_noise(self, name: str, func: Callable[..., Anything], args: Arguments, kwargs: Named) -> Anything:
        """An operation on random numbers that were not drawn."""
        bare = name.strip("_")
        bare = bare[1:] if name.startswith("__i") else bare
        if name in PLAIN:
            plain = func(*mapped(blank, args))
            return on_parts(func, args, kwargs) if isinstance(plain, torch.Tensor) else plain
        if name in MOVES and not any_noise(args[1:] if name == "__getitem__" else ()):
            return on_parts(func, args, kwargs)
        if name in ("__iter__", "iter"):
            return iter(on_parts(torch.unbind, args, {}))
        if name in ("item", "tolist") and args[0].form is not Form.PICK:
            return _numbers(on_parts(torch.squeeze, args, {}) if name == "item" else args[0])
        if name in CASTS and isinstance(args[0], Noise):
            dtype = func(blank(args[0]), *mapped(blank, args[1:]), **kwargs).dtype
            return Noise.made(args[0].handles, args[0].form, dtype, (args[0].scale, args[0].shift))
        if any(noise.form is Form.PICK for noise in noises_in((args, kwargs))):
            return func(*mapped(self._forced, args), **mapped(self._forced, kwargs))
        if bare in COMPARISONS:
            return self._compared(bare, *args[:2])
        if bare in ("argmax", "argmin", "max", "min"):
            return self._race(bare, *args, **kwargs)
        if bare in ("searchsorted", "bucketize"):
            return self._searched(bare, *args, **kwargs)
        return self._arithmetic(name, bare, args, kwargs)

    def _arithmetic(self, name: str, bare: str, args: Arguments, kwargs: Named) -> Tensor:
        """Affine maps, division, logarithm; in place where the name says so."""
        first, second = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if bare in ("clamp", "clip", "clamp_min", "clamp_max"):
            second = kwargs.get("min", second) if bare != "clamp_max" else None
            high = kwargs.get("max", args[2] if len(args) > 2 else None if bare != "clamp_max" else args[1])
            return self._in_place(name, first, clamped(first, second, high))
        if bare in ("radd", "rsub", "rmul", "rdiv", "rtruediv"):
            first, second, bare = second, first, bare[1:]
        tensors = [blank(each) for each in (first, second) if isinstance(each, torch.Tensor)]
        dtype = torch.promote_types(tensors[0].dtype, tensors[-1].dtype)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return self._in_place(name, args[0], combined(SYNONYMS.get(bare, bare), first, second, dtype))

    def _in_place(self, name: str, target: Tensor, result: Noise) -> Tensor:
        """`result`, written into `target` too where the operation's name says so."""
        changes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return self._write(target, result) if changes else result

    def _compared(self, bare: str, first: Anything, second: Anything) -> Tensor:
        """Decide each element; every answer narrows what its uniform can be."""
        if not isinstance(first, Noise):
            first, second, bare = second, first, MIRRORED[bare]
        if isinstance(second, Noise):
            msg = "two random numbers are compared with each other"
            raise NotFollowed(msg)
        asks_below, or_equal = COMPARISONS[bare]
        other = torch.as_tensor(second, dtype=torch.float64)
        parts = broadcast(first.handles, first.scale, first.shift, other)
        answers = [
            self._below(handle, first.form, (bound - shift), scale, or_equal=or_equal) is asks_below
            for handle, scale, shift, bound in zip(*(part.flatten().tolist() for part in parts), strict=True)
        ]
        return torch.tensor(answers, dtype=torch.bool).reshape(parts[0].shape)

    def _below(self, handle: int, form: Form, bound: float, scale: float, *, or_equal: bool) -> bool:
        """Whether scale · f(U) lies below the bound."""
        self.path.looked_at += 1
        if handle < 0 or scale == 0:
            return bound >= 0 if or_equal else bound > 0
        cut, rises = threshold(form, bound / scale)
        if rises == (scale > 0):
            return self.path.below(handle, cut, or_equal=or_equal)
        return not self.path.below(handle, cut, or_equal=not or_equal)

    def _race(self, bare: str, noise: Noise, dim: int | None = None, keepdim: bool = False) -> Anything:  # noqa: FBT001, FBT002 - torch's own signature
        """Which element is the largest or smallest: one of a draw's outcomes, decided when somebody looks."""
        handles, ranked = noise.handles, noise
        if dim is None:
            ranked, dim = (
                Noise.made(handles.flatten(), noise.form, noise.cast, (noise.scale.flatten(), noise.shift.flatten())),
                0,
            )
        parts = [part.movedim(dim, -1) for part in (ranked.handles, ranked.scale, ranked.shift)]
        moved = Noise.made(parts[0], noise.form, noise.cast, (parts[1], parts[2]))
        weights = race_weights(moved, largest=bare.endswith("max"))
        rows = zip(
            parts[0].reshape(-1, parts[0].shape[-1]).tolist(),
            weights.reshape(-1, parts[0].shape[-1]).tolist(),
            strict=True,
        )
        picked = picks([self._new_draw(racers, row) for racers, row in rows], tuple(parts[0].shape[:-1]))
        if keepdim:
            picked = on_parts(torch.unsqueeze, (picked, dim), {})
        if bare in ("max", "min"):
            if not keepdim and dim == 0 and handles.dim() != 1:
                msg = f"the {bare} of random numbers is used as a value"
                raise NotFollowed(msg)
            return torch.return_types.max((torch.full(tuple(picked.handles.shape), torch.nan), picked))
        return picked

    def _searched(self, bare: str, *args: Anything, **kwargs: Anything) -> Tensor:
        """Inverse cumulative distribution: which interval holds each uniform."""
        edges, noise = args[:2] if bare == "searchsorted" else args[1::-1]
        if not isinstance(noise, Noise) or isinstance(edges, Noise) or noise.form is not Form.UNIFORM:
            msg = f"random numbers of another form are put into torch.{bare}"
            raise NotFollowed(msg)
        edges = edges.double().expand(*noise.handles.shape[:-1], edges.shape[-1]) if edges.dim() > 1 else edges.double()
        right = bool(kwargs.get("right")) or kwargs.get("side") == "right"
        spread = edges[..., None, :] if edges.dim() > 1 else edges.expand(*noise.handles.shape, len(edges))
        rows = spread.expand(*noise.handles.shape, edges.shape[-1]).reshape(-1, edges.shape[-1]).tolist()
        found = [
            sum(not self._below(handle, noise.form, edge - shift, scale, or_equal=not right) for edge in row)
            for row, handle, scale, shift in zip(
                rows, *(part.flatten().tolist() for part in (noise.handles, noise.scale, noise.shift)), strict=True
            )
        ]
        return torch.tensor(found, dtype=torch.int64).reshape(noise.handles.shape)

    # ---------------------------------------------------------------------------------------------- draws and memory

    def _new_draw(self, racers: list[int], weights: list[float]) -> int:
        self._draws.append((racers, weights))
        return len(self._draws) - 1

    def _decide(self, draw: int) -> int:
        """The outcome of a draw, the same each time."""
        if draw not in self._decided:
            racers, weights = self._draws[draw]
            self.path.looked_at += len(racers)
            reused = any(racer in self._raced or not self.path.untouched(racer) for racer in racers)
            if reused and not self.path.independent:
                msg = "the same random numbers decide a draw and something else"
                raise NotFollowed(msg)
            self._raced.update(racers)
            self._decided[draw] = self.path.fork(weights)
        return self._decided[draw]

    def _forced(self, value: Anything) -> Anything:
        """A real tensor in place of draws that were not decided."""
        if not isinstance(value, Noise):
            return value
        if value.form is not Form.PICK:
            msg = "random numbers and drawn ids meet in one operation"
            raise NotFollowed(msg)
        parts = (part.flatten().tolist() for part in (value.handles, value.scale, value.shift))
        ids = [int(shift) if scale == 0 else self._decide(draw) for draw, scale, shift in zip(*parts, strict=True)]
        return torch.tensor(ids, dtype=value.cast).reshape(value.handles.shape)

    def _write(self, target: Tensor, result: Noise) -> Tensor:
        """An in-place operation, on noise or on real memory; every view of that memory sees it."""
        if isinstance(target, Noise):
            return target.become(result)
        storage = target.untyped_storage()
        size = storage.nbytes() // target.element_size()
        address = storage.data_ptr()
        unset = Noise.made(torch.full((size,), -2), result.form, target.dtype)
        kept, noise = self._held.setdefault(address, (target, unset))
        noise.form = result.form
        for part, value in zip(
            (noise.handles, noise.scale, noise.shift), (result.handles, result.scale, result.shift), strict=True
        ):
            part.as_strided(target.size(), target.stride(), target.storage_offset()).copy_(value)
        del kept
        return target

    def _as_held(self, value: Anything) -> Anything:
        """The noise that a real tensor's memory holds, or the tensor."""
        if not isinstance(value, torch.Tensor) or isinstance(value, Noise) or not value.numel():
            return value
        address = value.untyped_storage().data_ptr()
        if address not in self._held:
            return value
        noise = self._held[address][1]
        handles, scale, shift = (
            part.as_strided(value.size(), value.stride(), value.storage_offset())
            for part in (noise.handles, noise.scale, noise.shift)
        )
        unset = handles == -2
        if bool(unset.all()):
            return value
        if bool(unset.any()):
            msg = "random and other numbers share a tensor"
            raise NotFollowed(msg)
        return Noise.made(handles, noise.form, value.dtype, (scale, shift))


def _numbers(noise: Noise) -> Anything:
    """Python numbers that were not drawn, in lists as deep as the tensor."""
    if noise.handles.dim() == 0:
        return Number(noise)
    return [_numbers(each) for each in on_parts(torch.unbind, (noise,), {})]
