"""Messages on Redis: the news of one push, in one message.

A small outcome is part of the message, so that waiting callers need not read it from the database. It names the incarnation
of its invocation: when a message arrives late, the invocation may be purged and its id used again.
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

__all__ = ["KINDS", "MAX_OUTCOME_BYTES", "PublishedNews", "pack", "unpack"]

MAX_OUTCOME_BYTES = 4096
"""Larger outcomes are not part of the message."""
MAX_NAMES = 500
"""The most names of one kind, and the most outcomes, in one message; None stands for more names than that."""
KINDS: tuple[Kind, ...] = ("queue", "id", "journal", "claims")
_ENDS = "ends"


class PublishedNews(NamedTuple):
    """News, and the incarnation of the invocation whose outcome it contains."""

    news: News
    incarnation: str | None = None


def pack(some: Iterable[PublishedNews]) -> bytes | None:
    """Encode news as one message; None if there is no news."""
    names: dict[Kind, dict[str | None, None]] = {kind: {} for kind in KINDS}
    ends: dict[str, bytes] = {}
    for (kind, name, outcome, _), incarnation in some:
        if name is not None and outcome is not None and incarnation is not None and len(ends) < MAX_NAMES:
            data = _small(outcome, incarnation)
            if data is not None:
                ends[name] = data
                continue
        names[kind][name] = None
    message: dict[str, Any] = {
        kind: None if None in named or len(named) > MAX_NAMES else [*named] for kind, named in names.items() if named
    }
    if ends:
        message[_ENDS] = ends
    return packb(message, unicode_errors="surrogatepass") if message else None


def _small(outcome: Outcome, incarnation: str) -> bytes | None:
    error = outcome.error
    if len(outcome.result or b"") > MAX_OUTCOME_BYTES or (error is not None and len(error.message) > MAX_OUTCOME_BYTES):
        return None
    try:
        data = packb([incarnation, outcome.state, outcome.result or None, None if error is None else error.as_dict()])
    except (ValueError, TypeError, OverflowError):  # the database holds it in another way
        return None
    return data if len(data) <= MAX_OUTCOME_BYTES else None


def unpack(message: Any) -> list[PublishedNews]:
    """Decode a message. Anything else on the channel is ignored: others can write to it."""
    read = _unpacked(message)
    fields: Mapping[Any, Any] = cast("Mapping[Any, Any]", read) if isinstance(read, dict) else {}
    found: list[PublishedNews] = []
    for kind in KINDS:
        names = fields.get(kind, ())
        some = cast("Sequence[Any]", names) if isinstance(names, list) else ()
        if names is None or len(some) > MAX_NAMES:  # None, or more names than this package sends: any name may be meant
            found.append(PublishedNews(News(kind)))
        else:
            found += [PublishedNews(News(kind, name)) for name in some if isinstance(name, str)]
    ends: Any = fields.get(_ENDS)
    if isinstance(ends, dict):
        ended = cast("Mapping[Any, Any]", ends)
        found += [
            _published_outcome(id, _unpacked(data))
            for id, data in islice(ended.items(), MAX_NAMES)
            if isinstance(id, str)
        ]
        if len(ended) > MAX_NAMES:
            found.append(PublishedNews(News("id")))
    return found


def _unpacked(data: Any) -> Any:
    try:
        return unpackb(data, unicode_errors="surrogatepass")
    except READ_ERRORS:
        return None


def _published_outcome(id: str, fields: Any) -> PublishedNews:
    """An outcome; for anything else the hint that there may be one."""
    match fields:
        case [str(incarnation), str(state), bytes() | None as result, error] if state in TERMINAL:
            failure = failure_in(error)
            return PublishedNews(News("id", id, Outcome(id, state, result, failure)), incarnation)
        case _:
            return PublishedNews(News("id", id))
