"""Bodies of requests and responses, and typed access to their fields.

A body is a msgpack map. A field that is nil counts as absent, and a field that a reader does not know is ignored. Every
function raises WireError for a field that is missing or has another type; the sentence names the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

from ...errors import WireError
from ...ids import check_id
from ...limits import MAX_ITEMS_PER_REQUEST, MAX_SEQ
from ...wire._msgpack import READ_ERRORS, packb, unpackb
from ..contract.records import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Fields",
    "abbreviated",
    "decode",
    "decode_failure",
    "encode",
    "field",
    "is_list",
    "read_items",
    "read_pairs",
    "seconds",
    "text",
    "whole_number",
]

T = TypeVar("T")

Fields = dict[str, Any]


def encode(fields: Mapping[str, Any]) -> bytes:
    """The body that holds these fields."""
    return packb(fields, use_bin_type=True)


def decode(body: bytes, where: str) -> Fields:
    """The fields of a body; an empty body has none. Raises WireError, which names `where` the body came from."""
    if not body:
        return {}
    try:
        fields: Any = unpackb(body, raw=False, strict_map_key=False)
    except READ_ERRORS as exc:
        reason = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        raise WireError(
            f"expected a msgpack map as the body of {where}, got {len(body)} bytes: {reason[:200]}"
        ) from None
    if not isinstance(fields, dict):
        raise WireError(f"expected a msgpack map as the body of {where}, got a {type(fields).__name__}")
    return cast("Fields", fields)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def abbreviated(value: object, length: int) -> str:
    """The first `length` characters of a value's repr, or its type where the value is nested too deep for a repr."""
    try:
        return f"{value!r:.{length}}"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to be shown"


_REQUIRED: Any = object()
_TYPE_NAMES: dict[Any, str] = {
    str: "text",
    bytes: "bytes",
    int: "a whole number",
    bool: "true or false",
    dict: "a map",
    list: "a list",
}


def field(fields: Mapping[str, Any], name: str, kind: type[T], default: T = _REQUIRED) -> T:
    """The field `name`, which has the type `kind`. Raises WireError where it has another, or is absent without a default."""
    value = fields.get(name)
    if type(value) is kind:
        return value
    if value is not None:
        raise WireError(f"expected the field `{name}` to be {_TYPE_NAMES[kind]}, got a {type(value).__name__}")
    if default is _REQUIRED:
        raise WireError(f"expected the field `{name}`, {_TYPE_NAMES[kind]}, which is missing")
    return default


def seconds(fields: Mapping[str, Any], name: str, default: float, most: float = float("inf")) -> float:
    """A field of seconds: finite and not negative, cut down to `most`. Raises WireError for anything else."""
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise WireError(f"expected the field `{name}` to be a number of seconds from 0, got {abbreviated(value, 60)}")
    return min(float(value), most)


def whole_number(fields: Mapping[str, Any], name: str, default: int = _REQUIRED, least: int = 0) -> int:
    """A field that is a whole number from `least` to 2^62. Raises WireError for anything else."""
    value = field(fields, name, int, default)
    if not least <= value < MAX_SEQ:
        raise WireError(f"expected the field `{name}` from {max(least, 0)} to 2^62, got {value}")
    return value


def text(fields: Mapping[str, Any], name: str, default: str = _REQUIRED) -> str:
    """A field of text that can be written as UTF-8. Raises WireError for anything else."""
    value = field(fields, name, str, default)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise WireError(
                f"expected the field `{name}` to be text, got half of a character in {value!r:.60}"
            ) from None
    return value


def read_items(fields: Mapping[str, Any], name: str = "items") -> list[Fields]:
    """The items of a batch: a list of at most MAX_ITEMS_PER_REQUEST maps. Raises WireError for anything else."""
    items = _read_list(fields, name)
    for item in items:
        if type(item) is not dict:
            raise WireError(f"expected each of `{name}` to be a map, got a {type(item).__name__}")
    return items


def read_pairs(fields: Mapping[str, Any], name: str) -> tuple[tuple[str, int], ...]:
    """Claims as pairs of id and attempt, at most MAX_ITEMS_PER_REQUEST of them. Raises WireError for anything else."""
    return tuple(_read_pair(pair, name) for pair in _read_list(fields, name))


def _read_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    items: list[Any] = field(fields, name, list, [])
    if len(items) > MAX_ITEMS_PER_REQUEST:
        raise WireError(
            f"expected at most {MAX_ITEMS_PER_REQUEST} `{name}` in one request, got {len(items)}: send several"
        )
    return items


def _read_pair(pair: Any, name: str) -> tuple[str, int]:
    id, attempt = pair if is_list(pair) and len(pair) == 2 else (None, None)
    if not isinstance(attempt, int) or not 0 <= attempt < MAX_SEQ:
        raise WireError(f"expected each of `{name}` to be a pair of id and attempt, got {abbreviated(pair, 100)}")
    return check_id(id), attempt


def decode_failure(error: object) -> Failure | None:
    """The failure in an ack or an outcome: a map of type, message and traceback. Bare text is a DaemonError's message."""
    if error is None:
        return None
    if isinstance(error, dict):
        return Failure.from_dict(cast("Fields", error))
    return Failure("DaemonError", error if isinstance(error, str) else abbreviated(error, 1000))
