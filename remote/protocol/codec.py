"""JSON as every file and frame of the project carries it.

Non-finite floats have no JSON form, so they travel as the strings "NaN", "Infinity" and "-Infinity"; a dataclass field
declared `float` takes them back. Unknown fields are skipped, so an older reader opens what a newer writer wrote.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _float_word(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def plain(value: Any) -> Any:
    """Return `value` as JSON types: dataclasses become objects, tuples lists, non-finite floats strings."""
    # First, and by far the most frequent: metrics.
    if isinstance(value, float):
        return _float_word(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return ASCII JSON of `value`; compact unless `indent` is given."""
    # events.jsonl grows by a line a step for weeks: spaces would be a tenth of it.
    separators = (",", ":") if indent is None else None
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, indent=indent, separators=separators)


def loads_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises ValueError for anything else: bad UTF-8, bad JSON, another JSON type, nesting beyond the recursion limit.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return cast("dict[str, Any]", value)


# Resolving the annotations of a class takes 100 times longer than reading a record of it.
@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _to_float(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:  # JSON integers have no bound, floats do
        raise ValueError(f"{where}: {error}") from error


def _coerce(hint: Any, value: Any, where: str) -> Any:
    # Only a union's arguments are alternatives; those of dict and tuple are their items.
    options: tuple[Any, ...] = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if float in options:
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _to_float(value, where)
    for option in options:
        # type(), not isinstance: a bool is an int, and `true` for a step would become 1.
        if option in (bool, int, str) and type(value) is option:
            return value
        if isinstance(option, type) and dataclasses.is_dataclass(option) and isinstance(value, dict):
            return from_plain(option, cast("dict[str, Any]", value))
    return _coerce_container(hint, value, where)


def _coerce_container(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list):
        (item_hint, *_) = get_args(hint)
        return tuple(_coerce(item_hint, item, where) for item in cast("list[Any]", value))
    if origin is dict and isinstance(value, dict):
        item_hint = get_args(hint)[1]
        return {key: _coerce(item_hint, item, where) for key, item in cast("dict[str, Any]", value).items()}
    if hint is Any:
        return value
    raise ValueError(f"{where}: {type(value).__name__} does not fit {hint}")


def from_plain(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from parsed JSON, skipping unknown fields.

    Raises ValueError when a field is missing without a default, or its value is of another type than declared
    (bool is no int here; an int is a float).
    """
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if field.name in data:
            values[field.name] = _coerce(hints[field.name], data[field.name], f"{cls.__name__}.{field.name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
