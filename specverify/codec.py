"""The file edge: certificates and results as JSON, plans as TOML.

Note [Floats in JSON]: JSON has no NaN and no infinity, so they are written as the strings "NaN", "Infinity" and
"-Infinity"; a text that reads like one of them gets a backslash in front, so that both come back as what they were.
Whatever is written was read back before, so `dump(load(dump(x))) == dump(x)`, byte for byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from specverify.errors import InternalError, OutputError, PlanError, UsageError
from specverify.plan import BUDGETS, Plan
from specverify.records import SCHEMA_VERSION, Certificate, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "canonical",
    "check_plan",
    "dump",
    "first_fault",
    "load",
    "load_as",
    "nearest",
    "read_plan",
    "read_table",
    "read_text",
    "refuse_other_versions",
    "require_shallow",
    "typed_plan",
    "without_repeats",
    "write_text_atomically",
]

Record = TypeVar("Record")

_MOST_BYTES = 256 * 1024 * 1024  # of any file that is read: a wrong path should be a sentence, not a full memory
_MOST_SETTINGS_BYTES = 1024 * 1024  # of a plan or a policy: nobody writes more by hand
_MOST_DEPTH = 64  # of brackets in JSON or TOML; ours has fewer than ten
_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|[\[\]{}]')  # what stands in a string opens nothing
# a key of TOML with too many parts
_DOTTED = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_DEPTH}}}""")
_NON_FINITE = re.compile(r"\\*(NaN|-?Infinity)")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NUMBER_LIST = re.compile(r'\[\n(?:\s+(?:[-+.eE\d]+|"NaN"|"-?Infinity"),?\n)+\s*\]')


# ---------------------------------------------------------------------------------------------- JSON


def dump(record: object) -> str:
    """Canonical JSON of a `Certificate`, `CheckResult` or any other record: sorted keys, newline at the end.

    Raises `InternalError` for a record that would not come back as it is; a lone surrogate becomes U+FFFD.
    """
    try:
        return _text(_restored(_text(record), type(record)))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"a {type(record).__name__} can't be written as JSON: {first_fault(error)}"
        raise InternalError(msg) from error


def load(text: str, *, source: str = "the certificate") -> Certificate:
    """The bare record of a certificate; a certificate's file is read by `statement`. Raises `OutputError` for anything else."""
    return load_as(Certificate, text, source=source)


def load_as(kind: type[Record], text: str, *, source: str = "the file") -> Record:
    """A record of `kind` from its JSON; unknown, missing and repeated keys and wrong types raise `OutputError`."""
    require_shallow(text, source, OutputError)
    try:
        return _restored(text, kind)
    except ValidationError as error:
        msg = f"{source} is not a {kind.__name__} of specverify: {first_fault(error)}"
        raise OutputError(msg) from error
    except ValueError as error:
        msg = f"{source} is not JSON that specverify wrote: {error}"
        raise OutputError(msg) from error


def _text(record: object) -> str:
    return canonical(_plain(record))


def canonical(value: object) -> str:
    """JSON of plain values that is the same bytes for the same value: sorted keys, two spaces, UTF-8, one newline."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=2)
    text = _NUMBER_LIST.sub(lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text)
    return _LONE_SURROGATE.sub("\ufffd", text) + "\n"


def _plain(value: object) -> object:
    """Dictionaries, lists, numbers and strings; floats as Note [Floats in JSON] says."""
    if isinstance(value, str):
        text = str.__str__(value)
        return "\\" + text if _NON_FINITE.fullmatch(text) else text
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    msg = f"{type(value).__name__} is no JSON value"
    raise TypeError(msg)


def _rich(value: Any) -> Any:  # noqa: ANN401 - JSON is any
    """The inverse of `_plain`, where the types don't tell."""
    if isinstance(value, str):
        found = _NON_FINITE.fullmatch(value)
        return value if not found else value[1:] if value.startswith("\\") else float(value)
    if isinstance(value, dict):
        return {key: _rich(item) for key, item in value.items()}
    return [_rich(item) for item in value] if isinstance(value, list) else value


def _restored(text: str, kind: type[Record]) -> Record:
    raw = json.loads(text, object_pairs_hook=without_repeats)
    if kind is Certificate:
        refuse_other_versions(raw)
    record: Record = _adapter(kind).validate_json(  # type: ignore[arg-type]  # pydantic takes the literal
        json.dumps(_rich(raw)), strict=True, extra="forbid"
    )
    if isinstance(record, Certificate):  # the plan is of any type: lists in it were tuples
        return dataclasses.replace(record, plan=_frozen(record.plan))
    return record


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - any type that pydantic reads
    return TypeAdapter(kind)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises `ValueError` for a key that is there twice, which JSON itself lets pass."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        msg = f"the key {next(name for name in counted if counted[name] > 1)!r:.80} is there twice"
        raise ValueError(msg)
    return table


def _frozen(value: Any) -> Any:  # noqa: ANN401 - JSON is any
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def refuse_other_versions(raw: object) -> None:
    """Raise `OutputError` that says which specverify wrote it, and what to do."""
    found = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(found, int) and not isinstance(found, bool) and found != SCHEMA_VERSION:
        newer = found > SCHEMA_VERSION
        msg = f"made by {'a newer' if newer else 'an older'} specverify: it has schema version {found}, this one reads "
        msg += f"{SCHEMA_VERSION}; {'upgrade specverify' if newer else 'certify the pair again'}"
        raise OutputError(msg)


def first_fault(error: Exception) -> str:
    """What is wrong first, and where, in a few words."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    *parents, last = first["loc"] or ("",)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parents).lstrip(".")
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key {last!r}{f' in {place}' if place else ''}"
    if first["type"] == "missing":
        return f"the key {last!r} is missing{f' in {place}' if place else ''}"
    where = f"{place}.{last}".strip(".")
    said = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {said}" if where else said


# ---------------------------------------------------------------------------------------------- files


def write_text_atomically(path: str | Path, text: str) -> None:
    """The whole text or nothing: written beside `path`, synced, then renamed over it; folders are made.

    A device or pipe is written as it is. Raises `OutputError` when the disk is full, read-only or forbidden.
    """
    try:
        path = Path(os.path.realpath(path))
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
        try:
            with temporary.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        msg = f"can't write {path}: {_reason(error)}; no half of it was left behind"
        raise OutputError(msg) from error


def read_text(path: str | Path, what: str, kind: type[UsageError], *, most_bytes: int = _MOST_BYTES) -> str:
    """A user's file as text; whatever is wrong with it raises `kind` with one sentence that calls it `what`."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise OSError(0, f"it is larger than {most_bytes // 2**20} MiB")  # noqa: TRY301 - said like the others
        return content.decode("utf-8-sig")
    except OSError as error:
        msg = f"can't read {what} {path}: {_reason(error)}"
        raise kind(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{what} {path} is not UTF-8: byte {error.start + 1:,} is {error.object[error.start]:#04x}; save it as UTF-8"
        raise kind(msg) from error


def read_table(path: str | Path, what: str, kind: type[UsageError]) -> dict[str, Any]:
    """A user's TOML; whatever is wrong with it raises `kind` with one sentence that calls it `what`."""
    text = read_text(path, what, kind, most_bytes=_MOST_SETTINGS_BYTES)
    require_shallow(_DOTTED.sub("[" * (_MOST_DEPTH + 1), text), f"{what} {path}", kind)
    try:
        table = tomllib.loads(text)
        json.dumps(table, default=_refuse_date)
    except (ValueError, RecursionError) as error:
        reason = "a number has more digits than any setting" if "digits" in str(error) else error
        msg = f"{what} {path} is not TOML that specverify reads: {reason}"
        raise kind(msg) from error
    return table


def _refuse_date(value: object) -> None:
    msg = f"{value} is a date or a time, and no setting is; put quotes around what is a text"
    raise ValueError(msg)


def require_shallow(text: str, source: str, kind: type[UsageError]) -> None:
    """Raise `kind` for brackets within brackets without an end, before a parser follows them."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        sign = found[0]
        if sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        if depth > _MOST_DEPTH:
            msg = f"{source} is nested more than {_MOST_DEPTH} deep, which none of specverify's files is"
            raise kind(msg)


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say of a name that isn't known."""
    near = get_close_matches(name, names := list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


# ---------------------------------------------------------------------------------------------- plans


class _Range(NamedTuple):
    low: float
    high: float = math.inf
    ends: str = "[]"  # a round bracket leaves that end out

    def holds(self, value: float) -> bool:
        """Whether a finite value lies in it."""
        above = value > self.low or (value == self.low and self.ends[0] == "[")
        below = value < self.high or (value == self.high and self.ends[1] == "]")
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"{'at least' if self.ends[0] == '[' else 'above'} {self.low:,}"
        if self.high == math.inf:
            return low
        return f"{low} and {'at most' if self.ends[1] == ']' else 'below'} {self.high:,}"


_COUNT, _SHARE, _RATE = _Range(1, 10**8), _Range(0, 1), _Range(1e-300, 1, "()")  # shares of a smaller rate underflow
_RANGES: dict[str, _Range] = {
    "seed": _Range(0, 2**64 - 1),
    "num_speculative_tokens": _Range(1, 64),
    "false_fail_rate": _RATE,
    "false_pass_rate": _RATE,
    **dict.fromkeys(
        (name for name in Plan.__dataclass_fields__ if name.startswith("largest_undetected")), _Range(1e-4, 1, "[)")
    ),
    "minimum_speedup": _Range(0),
    "minimum_acceptance": _SHARE,
    "params.temperature": _Range(0),
    "params.top_k": _Range(0),
    "params.top_p": _Range(0, 1, "(]"),
    "params.min_p": _SHARE,
    "params.repetition_penalty": _Range(0, ends="(]"),
    "params.no_repeat_ngram_size": _Range(0),
    "params.min_new_tokens": _Range(0),
}
"""What a number of a plan may be; any other is a count, of more than which no disk holds the evidence."""
_WANTED: dict[object, str] = {int: "an integer", float: "a number", str: "a string", SamplingParams: "a table"}


def read_plan(path: str | Path, base: Plan) -> Plan:
    """`base` with what the TOML file sets; a `budget` in it brings that budget's numbers, which other keys then change.

    Raises `PlanError` that names the key, what it may be, and the nearest known name.
    """
    table = read_table(path, "the plan", PlanError)
    if "budget" in table:
        base = _budgeted(base, table["budget"], source=f"the plan {path}")
    return check_plan(_replaced(base, table, prefix="", source=f"the plan {path}"), source=f"the plan {path}")


def typed_plan(base: Plan, fields: Mapping[str, Any], *, source: str = "the plan") -> Plan:
    """`base` with fields of Python values, each checked against its own type and range; raises `PlanError`."""
    hints = get_type_hints(Plan)
    for key, value in fields.items():
        if key not in hints:
            msg = f"{source} has no field {key!r}; {nearest(key, hints)}"
            raise PlanError(msg)
        try:
            _adapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            wanted = _WANTED.get(hints[key]) or f"of its type ({first_fault(error)})"
            msg = f"{source} sets {key} to {value!r:.80}, which is not {wanted}"
            raise PlanError(msg) from error
    return check_plan(dataclasses.replace(base, **fields), source=source)


def check_plan(plan: Plan, *, source: str = "the plan") -> Plan:
    """The same plan; raises `PlanError` that names the first value out of its range and what it may be."""
    for prefix, part in (("", plan), ("params.", plan.params)):
        for each in dataclasses.fields(part):
            key, value = prefix + each.name, getattr(part, each.name)
            allowed = _RANGES.get(key, _COUNT)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not allowed.holds(value):
                msg = f"{source} sets {key} to {value}; it must be {allowed}"
                raise PlanError(msg)
    return plan


def _budgeted(base: Plan, name: object, *, source: str) -> Plan:
    if not isinstance(name, str) or name not in BUDGETS:
        msg = f"{source} sets budget to {name!r}; {nearest(str(name), BUDGETS)}"
        raise PlanError(msg)
    usual = {key: getattr(Plan(), key) for numbers_of in BUDGETS.values() for key in numbers_of}
    return dataclasses.replace(base, budget=name, **(usual | BUDGETS[name]))


PlanPart = TypeVar("PlanPart", Plan, SamplingParams)


def _replaced(part: PlanPart, table: Mapping[str, Any], *, prefix: str, source: str) -> PlanPart:
    hints = get_type_hints(type(part))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            msg = f"{source} has the unknown key '{prefix}{key}'; {nearest(key, hints)}"
            raise PlanError(msg)
        if hints[key] is SamplingParams and isinstance(value, dict):
            changes[key] = _replaced(getattr(part, key), value, prefix=f"{prefix}{key}.", source=source)
            continue
        try:
            changes[key] = _adapter(hints[key]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            wanted = _WANTED.get(hints[key]) or f"a list that fits ({first_fault(error)})"
            msg = f"{source} sets {prefix}{key} to {value!r:.80}, which is not {wanted}"
            raise PlanError(msg) from error
    return dataclasses.replace(part, **changes)
