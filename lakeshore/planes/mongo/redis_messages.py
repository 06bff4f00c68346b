"""What is published on Redis: the news of one push, in one message.

How an invocation ended rides along where it is small, so that who waits for it does not read it again. It names its birth: a
message that comes late is about an invocation that may have been purged since, and its id used again.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...wire._msgpack import READ_ERRORS, packb, unpackb
from ..contract.news import Kind, News
from ..contract.records import TERMINAL, Outcome
from .documents import failure_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KINDS", "SMALL", "Told", "pack", "unpack"]

SMALL = 4096
"""Bytes of an outcome that rides along, at most."""
NAMES = 500
"""Names of one kind in one message, and outcomes; of more names the message says only that there are some."""
KINDS: tuple[Kind, ...] = ("queue", "id", "journal", "claims")
_ENDS = "ends"


class Told(NamedTuple):
    """News, and the birth of the invocation whose outcome it brings."""

    news: News
    birth: str | None = None


def pack(some: Iterable[Told]) -> bytes | None:
    """One message; None where there is nothing to say."""
    names: dict[Kind, dict[str | None, None]] = {kind: {} for kind in KINDS}
    ends: dict[str, bytes] = {}
    for (kind, name, outcome, _), birth in some:
        if name is not None and outcome is not None and birth is not None and len(ends) < NAMES:
            data = _small(outcome, birth)
            if data is not None:
                ends[name] = data
                continue
        names[kind][name] = None
    message: dict[str, Any] = {
        kind: None if None in named or len(named) > NAMES else [*named] for kind, named in names.items() if named
    }
    if ends:
        message[_ENDS] = ends
    return packb(message, unicode_errors="surrogatepass") if message else None


def _small(outcome: Outcome, birth: str) -> bytes | None:
    error = outcome.error
    if len(outcome.result or b"") > SMALL or (error is not None and len(error.message) > SMALL):
        return None
    try:
        data = packb([birth, outcome.state, outcome.result or None, None if error is None else error.as_dict()])
    except (ValueError, TypeError, OverflowError):  # the database holds it in another way
        return None
    return data if len(data) <= SMALL else None


def unpack(message: Any) -> list[Told]:
    """The news in a message. Whoever reaches the channel can write there: what is none is ignored."""
    read = _unpacked(message)
    fields: Mapping[Any, Any] = cast("Mapping[Any, Any]", read) if isinstance(read, dict) else {}
    told: list[Told] = []
    for kind in KINDS:
        names = fields.get(kind, ())
        some = cast("Sequence[Any]", names) if isinstance(names, list) else ()
        if names is None or len(some) > NAMES:  # so many are of no writer of ours
            told.append(Told(News(kind)))
        else:
            told += [Told(News(kind, name)) for name in some if isinstance(name, str)]
    ends: Any = fields.get(_ENDS)
    if isinstance(ends, dict):
        ended = cast("Mapping[Any, Any]", ends)
        told += [_told(id, _unpacked(data)) for id, data in islice(ended.items(), NAMES) if isinstance(id, str)]
        if len(ended) > NAMES:
            told.append(Told(News("id")))
    return told


def _unpacked(data: Any) -> Any:
    try:
        return unpackb(data, unicode_errors="surrogatepass")
    except READ_ERRORS:
        return None


def _told(id: str, fields: Any) -> Told:
    """An outcome, or where it is none, the hint that there may be one."""
    match fields:
        case [str(birth), str(state), bytes() | None as result, error] if state in TERMINAL:
            failure = failure_in(error)
            return Told(News("id", id, Outcome(id, state, result, failure)), birth)
        case _:
            return Told(News("id", id))
