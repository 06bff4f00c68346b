"""News: hints that something changed, by which a plane wakes the callers that wait in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .operations import Append, Cancel, Finish, Operation, Reap, Requeue, Restore, Submit
from .records import TERMINAL, Outcome, Page

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cursor", "Kind", "News", "news_of"]


class Cursor(NamedTuple):
    """A place in a journal: the id of the invocation, the seq of the last frame that the reader has, and how many frames
    and bytes it takes at most."""

    id: str
    since: int
    limit: int
    max_bytes: int


Kind: TypeAlias = Literal["queue", "id", "journal", "claims"]


class News(NamedTuple):
    """A hint that something changed: of which kind, under which name (None: any), perhaps with what it is.

    A tuple and no dataclass: one is made for every operation that somebody waits for.

    outcome: how the invocation ended, or that it is unknown. page: what a journal has after a cursor.
    """

    kind: Kind
    name: str | None = None
    outcome: Outcome | None = None
    page: tuple[Cursor, Page] | None = None


def news_of(op: Operation, answer: Any) -> Sequence[News]:
    """What the `answer` to `op` means to those that wait in this process; nothing is read for it."""
    match op:
        case Submit():
            return [News("queue", op.queue)]
        case Finish():
            id = op.fence.id
            outcome = Outcome(id, op.state, op.result, op.error) if answer else None
            return [News("id", id, outcome), News("journal", id)]
        case Append():
            return [News("journal", op.fence.id)]
        case Requeue():
            queue = None if answer.delayed else answer.queue
            # The worker too: another one may have requeued its claim.
            return [*_news_of_row(op.fence.id, queue, answer.state), News("claims", op.fence.worker)]
        case Cancel():
            if answer.what == "asked":
                return [News("claims", answer.worker)]
            return _news_of_row(op.id, None, "killed") if answer.what == "killed" else []
        case Reap():
            news = [news for id, queue, state in answer.rows for news in _news_of_row(id, queue, state)]
            return [*news, *(News("queue", queue) for queue in answer.due)]
        case Restore() if not op.more:
            return _news_of_row(op.id, op.queue, op.state)
        case _:
            return []


def _news_of_row(id: str, queue: str | None, state: str) -> list[News]:
    if state in TERMINAL:
        return [News("id", id), News("journal", id)]
    return [] if queue is None else [News("queue", queue)]
