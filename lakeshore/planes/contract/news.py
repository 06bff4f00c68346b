"""News: hints that something changed, by which a plane wakes the callers that wait in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .operations import Append, Cancel, Finish, Operation, Reap, Requeue, Restore, Submit
from .records import TERMINAL, Outcome, Page

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Cursor", "Kind", "News", "news_of"]


class Cursor(NamedTuple):
    """A place in a journal, and how much of what comes after it is wanted at once: frames and bytes at most."""

    id: str
    since: int
    limit: int
    max_bytes: int


Kind: TypeAlias = Literal["queue", "id", "journal", "claims"]


class News(NamedTuple):
    """A hint that something changed: of which kind, under which name (None: any), maybe with the very thing.

    outcome: how the invocation ended, or that it is unknown. page: what a journal has after a cursor.
    """

    kind: Kind
    name: str | None = None
    outcome: Outcome | None = None
    page: tuple[Cursor, Page] | None = None


def news_of(op: Operation, answer: Any) -> Iterable[News]:
    """What `answer` to `op` means to those who wait in this process, without a read."""
    match op:
        case Submit():
            yield News("queue", op.queue)
        case Restore() if not op.more:
            yield from _row_news(op.id, op.queue, op.state)
        case Finish():
            id = op.fence.id
            yield News("id", id, Outcome(id, op.state, op.result, op.error) if answer else None)
            yield News("journal", id)
        case Append():
            yield News("journal", op.fence.id)
        case Requeue():
            yield from _row_news(op.fence.id, answer.queue if not answer.delayed else None, answer.state)
            yield News("claims", op.fence.worker)  # somebody else may have given it back
        case Cancel():
            if answer.what == "asked":
                yield News("claims", answer.worker)
            elif answer.what == "killed":
                yield from _row_news(op.id, None, "killed")
        case Reap():
            for id, queue, state in answer.rows:
                yield from _row_news(id, queue, state)
            for queue in answer.due:
                yield News("queue", queue)
        case _:
            pass


def _row_news(id: str, queue: str | None, state: str) -> Iterable[News]:
    if state in TERMINAL:
        yield News("id", id)
        yield News("journal", id)
    elif queue is not None:
        yield News("queue", queue)
