"""vLLM's rejection sampler from its wheel, its Triton kernels run as the Python that they are written in.

The module is loaded by itself; what it imports of vLLM is replaced by stand-ins, of which a call of `rejection_sample`
reaches only the launcher of kernels. A kernel's body runs once a program, on torch tensors: loads and stores are indexing,
one tile covers the vocabulary. An id that a kernel draws and stores is looked at when another one uses it, as on a GPU
nobody sees the ids that are not used; so `specverify qualify` can follow every path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULE = "v1/sample/rejection_sampler.py"
_STORED: dict[tuple[int, int], tuple[torch.Tensor, Later]] = {}
"""Ids that were drawn and stored, by tensor and place; the tensor is kept alive."""


@dataclass(frozen=True)
class Later:
    """An id of a race, plus a number."""

    drawn: torch.Tensor
    plus: int = 0
    loaded: bool = False

    def __radd__(self, other: int) -> Later:
        return replace(self, plus=self.plus + other)

    def __int__(self) -> int:
        return int(self.drawn.item()) + self.plus


@dataclass(frozen=True)
class Pointer:
    """A place in a tensor, or several."""

    memory: torch.Tensor
    at: int | torch.Tensor = 0

    def __add__(self, offset: int | torch.Tensor) -> Pointer:
        return replace(self, at=self.at + offset)

    def __sub__(self, offset: int) -> Pointer:
        return self + -offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


class Language:
    """What the kernels use of `triton.language`."""

    constexpr = int
    float32, float64, int32 = torch.float32, torch.float64, torch.int32
    program: tuple[int, ...] = ()

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        assert not shape, dtype
        return 0

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> float:
        assert not shape, dtype
        return value

    def arange(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end)

    def load(self, pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> object:
        if isinstance(pointer.at, int):
            if (id(pointer.memory), pointer.at) in _STORED:
                return replace(_STORED[id(pointer.memory), pointer.at][1], loaded=True)
            value = pointer.memory.flatten()[pointer.at]
            return value if value.dtype.is_floating_point else value.item()
        assert mask is not None
        values = pointer.memory.flatten()[pointer.at]
        return values if bool(mask.all()) else torch.where(mask, values, other)

    def store(self, pointer: Pointer, value: object) -> None:
        if isinstance(value, Later) and not value.loaded:
            _STORED[id(pointer.memory), pointer.at] = (pointer.memory, value)
        else:
            pointer.memory.view(-1)[pointer.at] = int(value)

    def where(self, condition: torch.Tensor, first: torch.Tensor, second: float) -> torch.Tensor:
        return first if bool(condition.all()) else torch.where(condition, first, second)

    def maximum(self, first: torch.Tensor, second: float) -> torch.Tensor:
        return first.clamp(min=second)

    def minimum(self, first: Later, second: int) -> Later:
        return first if isinstance(first, Later) else min(first, second)

    def max(self, values: torch.Tensor, axis: int, *, return_indices: bool) -> tuple[float, Later]:
        """There is one tile, so its largest value is compared with nothing but minus infinity."""
        assert return_indices
        return 0.0, Later(values.argmax(axis))


_LANGUAGE = Language()


def _launcher(*, kernel: Callable[..., None], warmup_inputs: object) -> Callable:
    """As vLLM's own: the decorated function gives the grid and the constants, its parameters are the kernel's."""
    del warmup_inputs

    def decorated(dispatch: Callable[..., tuple]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            bound = inspect.signature(dispatch).bind(*args, **kwargs).arguments
            grid, constants = dispatch(*args, **kwargs)
            known = dict(bound) | constants
            if "BLOCK_SIZE" in known:
                known["BLOCK_SIZE"] = known["vocab_size"]
            values = {name: known[name.removesuffix("_ptr")] for name in inspect.signature(kernel).parameters}
            pointers = {
                name: Pointer(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()
            }
            for program in product(*map(range, grid)):
                _LANGUAGE.program = program
                kernel(**pointers)

        return launch

    return decorated


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of vLLM's, empty but for names that can be imported."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        inside = name.partition(".")[0] == "vllm"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: SimpleNamespace if name[:1].isupper() else _Anything()
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.triton_utils":
            module.tl, module.triton = _LANGUAGE, SimpleNamespace(jit=lambda *given, **_: given[0] if given else _same)
        if module.__name__.endswith("jit_warmup_triton_helper"):
            module.triton_kernel_dispatcher_with_warmup = _launcher


class _Anything:
    def __call__(self, *_: object, **__: object) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        return self


def _same(kernel: Callable) -> Callable:
    return kernel


def installed() -> Path | None:
    """The module's file, where the wheel is."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else ()
    return next((Path(folder) / MODULE for folder in folders or () if (Path(folder) / MODULE).exists()), None)


@cache
def _module(line: str = "", instead: str = "") -> ModuleType:
    """The module, with one piece of a line replaced where a fault is planted."""
    text, before = installed().read_text(encoding="utf-8"), set(sys.modules)
    assert line in text, "this release has no such line"
    module, finder = ModuleType("vllm_rejection_sampler"), _StandIns()
    sys.meta_path.insert(0, finder)
    try:
        exec(compile(text.replace(line, instead) if line else text, MODULE, "exec"), module.__dict__)
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]
    return module


def sampler(line: str = "", instead: str = "") -> Callable[..., torch.Tensor]:
    """The `rejection_sample` of vLLM, or one with a fault."""
    own = _module(line, instead).rejection_sample

    @wraps(own)
    def called(*args: object, **kwargs: object) -> torch.Tensor:
        _STORED.clear()
        return own(*args, **kwargs)

    return called


if installed() is not None:
    rejection_sample = sampler()
