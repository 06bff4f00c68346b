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
from .encode_errors import CannotPack
from .registry import Codec, reserve
from .values import kind_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STDLIB"]


def _exactly(kind: type) -> Callable[[object], bool]:
    """A `match` of a Codec: the value is of this type and of no subclass."""

    def match(value: object) -> bool:
        return kind_of(value) is kind

    return match


# datetime ------------------------------------------------------------------------------------------------------------
# A time zone is nil, the key of a ZoneInfo, or the offset of a timezone in microseconds with its name if it has one.


def _pack_zone(value: datetime | time) -> object:
    zone = value.tzinfo
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        has_own_name = name != timezone(offset).tzname(None)
        return [offset // timedelta(microseconds=1), name if has_own_name else None]
    if zone is None:
        return None
    raise CannotPack(
        value,
        f"its time zone is a {type_name(zone)}, which has no portable form",
        "use zoneinfo.ZoneInfo(...) or datetime.timezone, for example value.astimezone(datetime.timezone.utc)",
    )


def _unpack_zone(zone: Any) -> tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return ZoneInfo(zone)
    microseconds, name = zone
    offset = timedelta(microseconds=microseconds)
    return timezone(offset) if name is None else timezone(offset, name)


def _pack_datetime(value: datetime) -> bytes:
    clock = (value.hour, value.minute, value.second, value.microsecond)
    return pack([value.year, value.month, value.day, *clock, value.fold, _pack_zone(value)])


def _unpack_datetime(body: bytes) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = unpack(body)
    return datetime(year, month, day, hour, minute, second, microsecond, _unpack_zone(zone), fold=fold)


def _pack_date(value: date) -> bytes:
    return pack([value.year, value.month, value.day])


def _unpack_date(body: bytes) -> date:
    return date(*unpack(body))


def _pack_time(value: time) -> bytes:
    return pack([value.hour, value.minute, value.second, value.microsecond, value.fold, _pack_zone(value)])


def _unpack_time(body: bytes) -> time:
    hour, minute, second, microsecond, fold, zone = unpack(body)
    return time(hour, minute, second, microsecond, _unpack_zone(zone), fold=fold)


def _pack_timedelta(value: timedelta) -> bytes:
    return pack([value.days, value.seconds, value.microseconds])


def _unpack_timedelta(body: bytes) -> timedelta:
    return timedelta(*unpack(body))


# Numbers, UUIDs ------------------------------------------------------------------------------------------------------


def _pack_uuid(value: UUID) -> bytes:
    return value.bytes


def _unpack_uuid(body: bytes) -> UUID:
    return UUID(bytes=body)


def _pack_decimal(value: Decimal) -> bytes:
    return str(value).encode("ascii")


def _unpack_decimal(body: bytes) -> Decimal:
    return Decimal(body.decode("ascii"))


def _pack_complex(value: complex) -> bytes:
    return struct.pack(">dd", value.real, value.imag)


def _unpack_complex(body: bytes) -> complex:
    return complex(*struct.unpack(">dd", body))


def _pack_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, signed=True)


def _unpack_int(body: bytes) -> int:
    return int.from_bytes(body, signed=True)


# Sets ----------------------------------------------------------------------------------------------------------------


def _pack_set(value: set[Any] | frozenset[Any]) -> bytes:
    for member in value:
        if not comes_back(member):
            reason = f"its member of type {type_name(member)} would not come back as the same member"
            raise CannotPack(value, reason, "send list(value)")
    # In the order of their bytes: equal sets pack to equal bytes.
    members = sorted(map(pack, value))
    return b"".join((b"\xdd", struct.pack(">I", len(members)), *members))


def _unpack_set(body: bytes) -> set[Any]:
    return set(_unpack_members(body))


def _unpack_frozenset(body: bytes) -> frozenset[Any]:
    return frozenset(_unpack_members(body))


def _unpack_members(body: bytes) -> list[Any]:
    members = unpack(body)
    if kind_of(members) is not list:
        raise ValueError("the members of a set are an array")
    return list(members)


# Paths ---------------------------------------------------------------------------------------------------------------

_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _is_path(value: object) -> bool:
    return type(value) in _PATHS.values()


def _pack_path(value: pathlib.PurePath) -> bytes:
    return pack([type(value).__name__, str(value).encode("utf-8", "surrogatepass")])


def _unpack_path(body: bytes) -> pathlib.PurePath:
    name, text = unpack(body)
    kind = _PATHS[name]
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):
        kind = _PATHS["Pure" + name]  # a path of the other kind of system cannot be opened here
    return kind(text.decode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------------------------------------------------------------

STDLIB: tuple[Codec, ...] = (
    Codec(16, "datetime.datetime", _exactly(datetime), _pack_datetime, _unpack_datetime),
    Codec(17, "datetime.date", _exactly(date), _pack_date, _unpack_date),
    Codec(18, "datetime.time", _exactly(time), _pack_time, _unpack_time),
    Codec(19, "datetime.timedelta", _exactly(timedelta), _pack_timedelta, _unpack_timedelta),
    Codec(20, "uuid.UUID", _exactly(UUID), _pack_uuid, _unpack_uuid),
    Codec(21, "decimal.Decimal", _exactly(Decimal), _pack_decimal, _unpack_decimal),
    Codec(22, "set", _exactly(set), _pack_set, _unpack_set),
    Codec(23, "frozenset", _exactly(frozenset), _pack_set, _unpack_frozenset),
    Codec(24, "complex", _exactly(complex), _pack_complex, _unpack_complex),
    Codec(25, "int", _exactly(int), _pack_int, _unpack_int),
    Codec(26, "pathlib.PurePath", _is_path, _pack_path, _unpack_path),
)
reserve(*STDLIB)
