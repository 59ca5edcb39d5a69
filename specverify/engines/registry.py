"""Engines by name: built-in ones, imported only when they are asked for, or `module:callable` of the user."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from specverify.callables import resolved
from specverify.engines import lacking_parts
from specverify.engines.child import opened_in_child
from specverify.engines.function import FunctionEngine, decodes
from specverify.errors import PlanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specverify.engines import Engine, EngineFactory, EngineSettings

__all__ = ["ENGINES", "factory_of", "find_engine", "opened"]

ENGINES: dict[str, str] = {
    "reference": "specverify.engines.reference:opened",
    "transformers": "specverify.engines.transformers:assisted",
    "transformers-lookup": "specverify.engines.transformers:lookup",
    "openai": "specverify.engines.openai:opened",
    "vllm": "specverify.engines.openai:opened_vllm",
    "sglang": "specverify.engines.openai:opened_sglang",
    "tgi": "specverify.engines.openai:opened_tgi",
    "llamacpp": "specverify.engines.llamacpp:opened",
    "mlx": "specverify.engines.mlx:opened",
    "onnxruntime": "specverify.engines.onnxruntime:opened",
    "openvino": "specverify.engines.openvino:opened",
    "fake": "specverify.engines.fake:opened",
}
"""`module:factory` of each built-in engine."""

_IN_CHILD = {"mlx": "mlx_lm", "onnxruntime": "onnxruntime_genai", "openvino": "openvino_genai"}
"""Engines that decode in native code of this machine, which may die of a request, and the package of each."""
_EXTRAS = {
    **dict.fromkeys(("openai", "vllm", "sglang", "tgi"), "http"),
    **{name: name for name in ("llamacpp", *_IN_CHILD)},
}
"""The optional extra that holds what an engine needs."""


def find_engine(name: str) -> EngineFactory:
    """The factory of a name; nothing is started yet.

    Raises `PlanError` with the nearest name, or `UsageError` that says what to install.
    """
    if ":" in name:
        return factory_of(resolved(name), name)
    if name not in ENGINES:
        near = get_close_matches(name, ENGINES, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(ENGINES)}, or module:callable of your own"
        msg = f"there is no engine named '{name}'; {hint}"
        raise PlanError(msg)
    module, _, factory = ENGINES[name].partition(":")
    try:
        if name in _IN_CHILD:
            _require_package(_IN_CHILD[name])
            return partial(opened_in_child, ENGINES[name])
        return cast("EngineFactory", getattr(importlib.import_module(module), factory))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(name)
        needs = f"specverify-decoding[{extra}]" if extra else str(error.name)
        msg = f"the engine {name} needs the package {error.name}, which isn't installed; install {needs}"
        raise UsageError(msg) from error


def _require_package(package: str) -> None:
    """Raise `ModuleNotFoundError` without importing what is there."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)


@contextlib.contextmanager
def opened(
    name: str,
    settings: EngineSettings,
    *,
    given: Callable[..., Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Engine]:
    """The engine of a name, or of what is `given` under that name; its servers end with the context, whatever happened.

    What takes long is told to `say`.
    """
    factory = find_engine(name) if given is None else factory_of(given, name)
    more: dict[str, Any] = {"say": say} if "say" in inspect.signature(factory).parameters else {}
    with factory(settings, **more) as engine:
        yield engine


def factory_of(given: Callable[..., Any], name: str) -> EngineFactory:
    """Of a function that decodes, or of one that makes an engine, a context of one, or a function that decodes."""

    @contextlib.contextmanager
    def factory(settings: EngineSettings) -> Iterator[Engine]:
        if decodes(given):
            yield FunctionEngine(given, name=name)
            return
        made = _made(name, given, settings)
        with made if hasattr(made, "__enter__") else contextlib.nullcontext(made) as inner:
            yield _as_engine(name, inner)

    return factory


def _made(name: str, given: Callable[..., Any], settings: EngineSettings) -> Any:  # noqa: ANN401 - whatever the user returns
    """What the user's factory returns, with the settings where it takes them."""
    try:
        wants = bool(inspect.signature(given).parameters)
    except ValueError:  # a builtin that tells no signature
        wants = True
    try:
        return given(settings) if wants else given()
    except TypeError as error:
        msg = f"{name} can't be called with EngineSettings: {error}; write a function of (settings), or one that decodes: {_SHAPE}"
        raise PlanError(msg) from error


_SHAPE = "(prompt_ids, n, max_new_tokens, seed, **sampling) -> list[list[int]]"


def _as_engine(name: str, inner: Any) -> Engine:  # noqa: ANN401 - whatever the user returned
    if callable(inner) and lacking_parts(inner) and decodes(inner):
        return FunctionEngine(inner, name=name)
    if lacks := lacking_parts(inner):
        kind = type(inner).__name__
        msg = f"{name} gave a {kind} that is no engine (it lacks {', '.join(lacks)}) and no function {_SHAPE}"
        raise PlanError(msg)
    return cast("Engine", inner)
