"""An engine by its name, for the surfaces that have a subject already: the reference decoder, or `module:callable`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specverify.engines import EngineSettings
from specverify.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.engines import Engine
    from specverify.plan import Plan
    from specverify.subject import Subject

__all__ = ["opened_engine"]

_REGISTRY = "specverify.engines.registry"
"""Where engines have names, in the releases that have them."""


@contextlib.contextmanager
def opened_engine(name: str, subject: Subject, plan: Plan) -> Iterator[Engine | None]:
    """The engine while the context lasts; None for the reference decoder, which the subject has.

    Raises `PlanError` for a name that is none.
    """
    if name == "reference":
        yield None
        return
    if subject.pair is None:
        msg = f"the engine {name} needs the folders of a pair"
        raise PlanError(msg)
    draft = subject.pair.draft
    settings = EngineSettings(
        target=Path(subject.pair.target.source),
        draft=Path(draft.source) if draft is not None else None,
        num_speculative_tokens=plan.num_speculative_tokens,
        eos_token_ids=subject.eos_token_ids,
        max_length=subject.target.max_length,
        max_batch_size=plan.batch_size,
    )
    made: Any
    if importlib.util.find_spec(_REGISTRY) is not None:
        made = importlib.import_module(_REGISTRY).opened(name, settings)
    else:
        made = _users_own(name)(settings)
    with made if hasattr(made, "__enter__") else contextlib.nullcontext(made) as engine:
        yield engine


def _users_own(name: str) -> Any:  # noqa: ANN401 - whatever the user names
    module, colon, attribute = name.partition(":")
    if not colon:
        msg = f"there is no engine named '{name}'; known: reference, or module:callable of your own"
        raise PlanError(msg)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        msg = f"the engine {name} can't be imported: {error}"
        raise PlanError(msg) from error
