"""`STDLIB`: ready-made codecs for common values of the standard library. Off until registered, on both sides:

    wire.register(*wire.STDLIB)

Each takes exactly its type, no subclass (a `pandas.Timestamp` is a datetime and would come back as a plain one), and
gives back an equal value of the same type.
"""

from __future__ import annotations

import pathlib
import struct
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

from .codec import comes_back, pack, unpack
from .encode_errors import Refused, kind_of, type_name
from .registry import Codec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STDLIB"]


def _exactly(kind: type) -> Callable[[object], bool]:
    return lambda value: kind_of(value) is kind


# A time zone is nil, the key of a ZoneInfo, or the offset of a timezone in microseconds with its name if it has one.


def _pack_zone(value: datetime | time) -> object:
    zone = value.tzinfo
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        return [offset // timedelta(microseconds=1), None if name == timezone(offset).tzname(None) else name]
    if zone is None:
        return None
    raise Refused(
        value,
        f"its time zone is a {type_name(zone)}, which has no portable form",
        "use zoneinfo.ZoneInfo(...) or datetime.timezone, for example value.astimezone(datetime.timezone.utc)",
    )


def _unpack_zone(zone: Any) -> tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return ZoneInfo(zone)
    offset, name = zone
    return timezone(timedelta(microseconds=offset)) if name is None else timezone(timedelta(microseconds=offset), name)


def _pack_datetime(value: datetime) -> bytes:
    clock = (value.hour, value.minute, value.second, value.microsecond)
    return pack([value.year, value.month, value.day, *clock, value.fold, _pack_zone(value)])


def _unpack_datetime(body: bytes) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = unpack(body)
    return datetime(year, month, day, hour, minute, second, microsecond, _unpack_zone(zone), fold=fold)


def _pack_time(value: time) -> bytes:
    return pack([value.hour, value.minute, value.second, value.microsecond, value.fold, _pack_zone(value)])


def _unpack_time(body: bytes) -> time:
    hour, minute, second, microsecond, fold, zone = unpack(body)
    return time(hour, minute, second, microsecond, _unpack_zone(zone), fold=fold)


def _pack_set(value: set[Any] | frozenset[Any]) -> bytes:
    for member in value:
        if not comes_back(member):
            why = f"its member of type {type_name(member)} would not come back as the same member"
            raise Refused(value, why, "send list(value)")
    # In the order of their bytes: equal sets pack to equal bytes.
    members = sorted(map(pack, value))
    return b"".join((b"\xdd", struct.pack(">I", len(members)), *members))


def _unpack_members(body: bytes) -> list[Any]:
    members = unpack(body)
    if kind_of(members) is not list:
        raise ValueError("the members of a set are an array")
    return list(members)


def _pack_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, signed=True)


_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _pack_path(value: pathlib.PurePath) -> bytes:
    return pack([type(value).__name__, str(value).encode("utf-8", "surrogatepass")])


def _unpack_path(body: bytes) -> pathlib.PurePath:
    name, text = unpack(body)
    kind = _PATHS[name]
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):
        kind = _PATHS["Pure" + name]  # a path of the other kind of system cannot be opened here
    return kind(text.decode("utf-8", "surrogatepass"))


STDLIB: tuple[Codec, ...] = (
    Codec(16, "datetime.datetime", _exactly(datetime), _pack_datetime, _unpack_datetime),
    Codec(
        17,
        "datetime.date",
        _exactly(date),
        lambda value: pack([value.year, value.month, value.day]),
        lambda body: date(*unpack(body)),
    ),
    Codec(18, "datetime.time", _exactly(time), _pack_time, _unpack_time),
    Codec(
        19,
        "datetime.timedelta",
        _exactly(timedelta),
        lambda value: pack([value.days, value.seconds, value.microseconds]),
        lambda body: timedelta(*unpack(body)),
    ),
    Codec(20, "uuid.UUID", _exactly(UUID), lambda value: value.bytes, lambda body: UUID(bytes=body)),
    Codec(
        21,
        "decimal.Decimal",
        _exactly(Decimal),
        lambda value: str(value).encode("ascii"),
        lambda body: Decimal(body.decode("ascii")),
    ),
    Codec(22, "set", _exactly(set), _pack_set, lambda body: set(_unpack_members(body))),
    Codec(23, "frozenset", _exactly(frozenset), _pack_set, lambda body: frozenset(_unpack_members(body))),
    Codec(
        24,
        "complex",
        _exactly(complex),
        lambda value: struct.pack(">dd", value.real, value.imag),
        lambda body: complex(*struct.unpack(">dd", body)),
    ),
    Codec(25, "int", _exactly(int), _pack_int, lambda body: int.from_bytes(body, signed=True)),
    Codec(26, "pathlib.PurePath", lambda value: type(value) in _PATHS.values(), _pack_path, _unpack_path),
)
