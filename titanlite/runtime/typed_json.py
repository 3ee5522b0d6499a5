"""Converts JSON files of ours to values of declared types: each file is checked once, where it is
read.

What it is: `typed(kind, value)` makes a dataclass, NamedTuple (from an array), TypedDict, list,
tuple or dict of what `json.loads` returned. The annotations say what is valid: `Annotated[int,
range(...)]` gives bounds, and `Annotated[str, re.compile(...)]` a pattern of the whole text.
Why it is here: the file may be damaged, cut, or of another version. A value of another type would
fail somewhere later, far from the file, and a number out of bounds could make a loop endless.
Why not a library: pydantic or msgspec would be a dependency of the core, for five small files.
What it costs: about a microsecond per value.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

T = TypeVar("T")
LARGEST = 1 << 63  # every integer of a file is below it
Count: TypeAlias = Annotated[int, range(1 << 62)]
Sha256: TypeAlias = Annotated[str, re.compile("[0-9a-f]{64}")]


def typed(kind: type[T], value: object) -> T:
    """Converts a value to `kind`.

    Raises ValueError with the place, what is expected there and what was found.
    """
    result: T = _typed(kind, value, "")
    return result


def _typed(kind: Any, value: object, where: str) -> Any:
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _bounded(_typed(arguments[0], value, where), arguments[1], where)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _typed(kind, value, where)
    if origin in (list, tuple):  # a tuple[X, ...]
        items = _expect(list, value, where)
        return origin(_typed(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _expect(dict, value, where)
        return {name: _typed(arguments[1], v, f"{where}.{name}") for name, v in entries.items()}
    if hasattr(kind, "_fields"):  # a NamedTuple
        items = _expect(list, value, where)
        names = kind._fields
        if len(items) > len(names):
            raise ValueError(
                f"{where.lstrip('.')}: expected {len(names)} items, found {len(items)}"
            )
        by_name = dict(zip(names, items, strict=False))  # those with a default may be absent
        return kind(**_members(kind, by_name, where))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__required_keys__"):
        return kind(**_members(kind, _expect(dict, value, where), where))
    return _expect(kind, value, where)


def _members(kind: type, values: dict[str, object], where: str) -> dict[str, Any]:
    """Converts the members of a class. Those with a default may be absent."""
    hints = _hints(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{where}.{unknown[0]:.100}: is not known".lstrip("."))
    missing = [name for name in _required(kind) if name not in values]
    if missing:
        raise ValueError(f"{where}.{missing[0]}: is missing".lstrip("."))
    return {name: _typed(hints[name], value, f"{where}.{name}") for name, value in values.items()}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _required(kind: Any) -> list[str]:  # for NamedTuples, TypedDicts and dataclasses
    if hasattr(kind, "_fields"):
        return [name for name in kind._fields if name not in kind._field_defaults]
    if not dataclasses.is_dataclass(kind):
        return sorted(kind.__required_keys__)
    required = []
    for field in dataclasses.fields(kind):
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return required


def _expect(kind: type, value: object, where: str) -> Any:
    """Returns the value if it is of exactly this type.

    A float may be written as an integer; a boolean is not a number.
    """
    place = where.lstrip(".") or "the file"
    allowed = (int, float) if kind is float else (kind,)
    if type(value) not in allowed:
        raise ValueError(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError(f"{place}: expected an integer of 64 bits, found a larger one")
    return value


def _bounded(value: Any, bound: range | re.Pattern[str], where: str) -> Any:
    if isinstance(bound, range):
        valid = value in bound
        allowed = f"{bound.start} to {bound.stop - 1}"
    else:
        valid = bound.fullmatch(value) is not None
        allowed = f"a text as {bound.pattern}"
    if not valid:
        raise ValueError(f"{where.lstrip('.')}: expected {allowed}, found {value!r:.100}")
    return value
