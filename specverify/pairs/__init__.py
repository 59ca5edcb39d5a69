"""The pairs that come with specverify: really trained, small enough for a CPU, and one that must not be rolled out.

Standard library only: this names folders, it loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from specverify.errors import PairError

__all__ = ["PairPaths", "embedded", "embedded_pairs"]

_FOLDER = Path(__file__).parent / "embedded"
_DRAFTS = {"embedded": "draft", "embedded-marginal": "draft-marginal", "embedded-poor": "draft-poor"}


@dataclass(frozen=True)
class PairPaths:
    """Where a shipped pair and its prompts lie."""

    name: str
    target: Path
    draft: Path
    prompts: Path


def embedded_pairs() -> tuple[str, ...]:
    """Names of the pairs: the distilled draft, the same without distillation, and a draft that costs more than it saves."""
    return tuple(_DRAFTS)


def embedded(name: str = "embedded") -> PairPaths:
    """The shipped pair of that name. Raises `PairError` with the nearest name."""
    if name not in _DRAFTS:
        near = get_close_matches(str(name), _DRAFTS, n=1, cutoff=0.3)
        msg = f"there is no embedded pair named '{name}'; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(_DRAFTS)}"
        raise PairError(msg)
    return PairPaths(name, _FOLDER / "target", _FOLDER / _DRAFTS[name], _FOLDER / "prompts.jsonl")
