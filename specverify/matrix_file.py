"""A matrix as TOML: which targets, drafts, parameters and numbers of tokens; read strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping  # noqa: TC003 - pydantic resolves the annotations at run time
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from specverify.codec import first_fault, nearest, read_table
from specverify.errors import PlanError
from specverify.matrix import Cell
from specverify.plan import Plan
from specverify.records import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Matrix", "cells_of", "plan_text", "read_matrix"]

_MOST_CELLS = 1_000


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What `specverify certify --matrix` certifies: every combination."""

    targets: tuple[str, ...]
    """Folders or hub names, as on the command line."""
    drafts: tuple[str, ...]
    num_speculative_tokens: tuple[int, ...] = (3,)
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    """Names of sampling parameters, each with fields of `SamplingParams`."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan that all cells share."""
    prompts: str = ""
    """A JSONL file; the embedded prompts without it."""
    false_discovery_rate: float | None = None
    """Of the cells that are named as lossy over the matrix, how many may be named by chance; half of `false_fail_rate` without it."""

    @property
    def num_cells(self) -> int:
        """Of all combinations."""
        return len(self.targets) * len(self.drafts) * len(self.num_speculative_tokens) * len(self.parameters)

    @property
    def _half(self) -> float:
        return float(self.plan.get("false_fail_rate", Plan.false_fail_rate)) / 2

    @property
    def cell_rate(self) -> float:
        """What a cell may spend on false alarms: half of the matrix's, shared evenly."""
        return self._half / self.num_cells

    @property
    def named_rate(self) -> float:
        """What e-BH may spend on them: the other half, unless the file says otherwise."""
        return self._half if self.false_discovery_rate is None else self.false_discovery_rate


def read_matrix(path: str | Path) -> Matrix:
    """A matrix from TOML; raises `PlanError` that names the key and the nearest known one."""
    table, source = read_table(path, "the matrix", PlanError), f"the matrix {path}"
    _require_known(table, Matrix, source, prefix="")
    _require_known(table.get("plan"), Plan, source, prefix="plan.")
    parameters = table.get("parameters")
    for name, each in parameters.items() if isinstance(parameters, dict) else ():
        _require_known(each, SamplingParams, source, prefix=f"parameters.{name}.")
    try:
        matrix: Matrix = TypeAdapter(Matrix).validate_json(json.dumps(table), strict=True, extra="forbid")
    except ValidationError as error:
        msg = f"{source}: {first_fault(error)}"
        raise PlanError(msg) from error
    for key in ("params", "num_speculative_tokens"):
        if key in matrix.plan:
            msg = (
                f"{source} sets plan.{key}, which varies over the cells; set {'parameters' if key == 'params' else key}"
            )
            raise PlanError(msg)
    rate = matrix.plan.get("false_fail_rate", Plan.false_fail_rate)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1:
        msg = f"{source} sets plan.false_fail_rate to {rate!r:.60}; it must lie between 0 and 1"
        raise PlanError(msg)
    if matrix.false_discovery_rate is not None and not 0 < matrix.false_discovery_rate < 1:
        msg = f"{source} sets false_discovery_rate to {matrix.false_discovery_rate}; it must lie between 0 and 1"
        raise PlanError(msg)
    if not 0 < matrix.num_cells <= _MOST_CELLS:
        msg = f"{source} has {matrix.num_cells:,} cells; give at least one of each, and at most {_MOST_CELLS:,} cells"
        raise PlanError(msg)
    _require_different(matrix, source)
    return matrix


def _require_different(matrix: Matrix, source: str) -> None:
    """Raise `PlanError` for a cell that is there twice: it would be certified twice, and count twice."""
    settings = [json.dumps(each, sort_keys=True) for each in matrix.parameters.values()]
    listed: dict[str, Sequence[object]] = {
        "targets": [_place(each) for each in matrix.targets],
        "drafts": [_place(each) for each in matrix.drafts],
        "num_speculative_tokens": matrix.num_speculative_tokens,
        "parameters": settings,
    }
    for key, values in listed.items():
        twice = next((place for place, value in enumerate(values) if value in values[:place]), None)
        if twice is not None:
            shown = [*matrix.parameters][twice] if key == "parameters" else getattr(matrix, key)[twice]
            msg = f"{source} names one of {key} twice ({shown!r:.200}); leave one out"
            raise PlanError(msg)


def _place(source: str) -> str:
    """A folder by its real name; a hub name as it is."""
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def cells_of(matrix: Matrix) -> Iterator[Cell]:
    """Every combination, those of one pair one after the other; the number in front makes its folder's name unique."""
    combined = product(matrix.targets, matrix.drafts, matrix.parameters, matrix.num_speculative_tokens)
    for number, (target, draft, parameters, tokens) in enumerate(combined, start=1):
        parts = (Path(target).name, Path(draft).name, parameters, f"{tokens}-tokens")
        name = re.sub(r"[^\w.+-]+", "-", "+".join(part[:40] or "model" for part in parts))
        yield Cell(
            name=f"{number:03}-{name}", target=target, draft=draft, parameters=parameters, num_speculative_tokens=tokens
        )


def plan_text(matrix: Matrix, cell: Cell, *, lossless_tokens: int = 0) -> str:
    """The cell's plan as TOML, so that its certificate can be made again by itself.

    `lossless_tokens`, where given, is what the cell's smaller share of the error budget asks for.
    """
    settings = {**matrix.plan, "false_fail_rate": matrix.cell_rate}
    if lossless_tokens:
        settings["lossless_tokens"] = lossless_tokens
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    lines.append(f"num_speculative_tokens = {cell.num_speculative_tokens}")
    if chosen := matrix.parameters[cell.parameters]:
        lines += ["", "[params]", *(f"{key} = {_toml(value)}" for key, value in chosen.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Numbers, booleans, strings and lists of them are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=True)


def _require_known(table: object, kind: type, source: str, *, prefix: str) -> None:
    known = get_type_hints(kind) if kind is not Matrix else {each.name: each for each in fields(Matrix)}
    for key in table if isinstance(table, dict) else ():
        if key not in known:
            msg = f"{source} has the unknown key '{prefix}{key}'; {nearest(key, known)}"
            raise PlanError(msg)
