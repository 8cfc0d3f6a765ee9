"""Values of the core as JSON and back, exactly: structs, arrays, tuples, and floats that JSON has no word for.

What comes back equals what was written, to the byte of its arrays. Structs are named by module and class; only those of
`stretto`, or of modules that the caller trusts, are made again.
"""

from __future__ import annotations

import base64
import importlib
import math
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np


class CodecError(ValueError):
    """What was to be written is no plain value, or what was read is none of ours."""


def plain(value: Any) -> Any:
    """As JSON has it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    raise CodecError(f"a value of type {type(value).__name__} cannot be written down")


def rich(value: Any, trusted: Collection[str] = ()) -> Any:
    """What `plain` was given. `trusted`: modules besides ours whose structs may be made."""
    if isinstance(value, list):
        return [rich(item, trusted) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind not in _READERS:
        raise CodecError(f"{kind!r} is no kind of value")
    try:
        return _READERS[kind](value, trusted)
    except (KeyError, TypeError, AttributeError, ImportError, ValueError) as error:
        raise CodecError(f"a damaged value of kind {kind!r}: {error}") from error


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    kind = value.dtype.newbyteorder("<")
    data = base64.b64encode(np.ascontiguousarray(value, kind).tobytes()).decode()
    return {"$array": kind.str, "shape": list(value.shape), "data": data}


def _struct(value: msgspec.Struct) -> dict[str, Any]:
    fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return {"$struct": _name(value), "fields": fields}


def _tuple(value: tuple[Any, ...]) -> dict[str, Any]:
    items = [plain(item) for item in value]
    return {"$named": _name(value), "items": items} if hasattr(value, "_fields") else {"$tuple": items}


def _name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


_WRITERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (np.ndarray, _array),
    (msgspec.Struct, _struct),
    (tuple, _tuple),
    (list, lambda value: [plain(item) for item in value]),
    (dict, lambda value: {"$dict": [[plain(key), plain(item)] for key, item in value.items()]}),
    (frozenset, lambda value: {"$set": sorted((plain(item) for item in value), key=repr)}),
)


def _read_array(value: dict[str, Any], trusted: Collection[str]) -> np.ndarray[Any, Any]:
    kind = np.dtype(value["$array"])
    flat = np.frombuffer(base64.b64decode(value["data"]), kind)
    return flat.reshape(value["shape"]).astype(kind.newbyteorder("="))


def _class_of(name: str, trusted: Collection[str]) -> Any:
    module, _, path = name.partition(":")
    if module.split(".")[0] != "stretto" and module not in trusted:
        raise CodecError(f"a struct of {module!r} is not made")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not issubclass(found, msgspec.Struct | tuple):
        raise CodecError(f"{name!r} is no struct")
    return found


def _read_struct(value: dict[str, Any], trusted: Collection[str]) -> Any:
    fields = {name: rich(item, trusted) for name, item in value["fields"].items()}
    return _class_of(value["$struct"], trusted)(**fields)


_READERS: dict[str, Callable[[dict[str, Any], Collection[str]], Any]] = {
    "$float": lambda value, trusted: float(value["$float"]),
    "$array": _read_array,
    "$struct": _read_struct,
    "$named": lambda value, trusted: _class_of(value["$named"], trusted)(*rich(value["items"], trusted)),
    "$tuple": lambda value, trusted: tuple(rich(value["$tuple"], trusted)),
    "$dict": lambda value, trusted: {rich(key, trusted): rich(item, trusted) for key, item in value["$dict"]},
    "$set": lambda value, trusted: frozenset(rich(value["$set"], trusted)),
}
