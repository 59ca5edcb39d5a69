"""`module:callable` on a command line: somebody else's function, from an installed package or from the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from specverify.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["resolved"]


def resolved(name: str) -> Callable[..., Any]:
    """The function of `module:function`, the current folder being importable. Raises `PlanError` where there is none."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        msg = f"'{name}' names no function; write module:function"
        raise PlanError(msg)
    if os.getcwd() not in sys.path:  # noqa: PTH109 - an entry of sys.path is a string
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as above
    try:
        found = attrgetter(path)(importlib.import_module(module_name))
    except ImportError as error:
        msg = f"the module {module_name} can't be imported: {error}; run from the folder that holds it, or install it"
        raise PlanError(msg) from error
    except AttributeError as error:
        msg = f"the module {module_name} has no {path}; write module:function"
        raise PlanError(msg) from error
    if not callable(found):
        msg = f"{name} is a {type(found).__name__}, not a function"
        raise PlanError(msg)
    function: Callable[..., Any] = found
    return function
