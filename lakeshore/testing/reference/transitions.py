"""How an invocation moves, as data. The reference model runs on this table; `check_plane` holds every store against it.

A rule applies when the row stands as it says, the event comes, and all its conditions are true; of several the first.
Where none applies the event is refused and changes nothing. `lapsed` is a standing of its own, though people see such a
row as queued: its claim expired and nobody has claimed it since, so that claim may still speak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["TABLE", "Condition", "Effect", "Event", "Rule", "Standing", "find_rule"]

Standing: TypeAlias = Literal["absent", "queued", "lapsed", "running", "ended"]
"""Where a row stands before an event; `ended` is any of the terminal states."""

Event: TypeAlias = Literal[
    "submit", "claim", "again", "beat", "append", "finish", "release", "retry", "cancel", "expire", "purge",
    "restore",
]  # fmt: skip
"""What happens to one row. `again` is a claim that is repeated, `expire` and `purge` are what Reap and Purge look for."""

Condition: TypeAlias = Literal[
    "key taken",  # another row of the queue has the key
    "due",  # its delay, if any, is over
    "renumbers",  # the claim has a lease, or the journal is empty
    "same poll",  # claimed by this very worker and poll
    "fence",  # the claim that speaks is the row's
    "own",  # the claim that speaks ended the row by its own ack
    "leased",  # the claim has a lease
    "asked",  # cancellation is asked for
    "all there",  # each frame is in the journal, from this attempt
    "open",  # the journal has no final frame
    "unwritten",  # no other attempt wrote a frame of these numbers
    "expired",  # as Reap says
    "uncounted",  # the expiry is free of cost
    "budget",  # with this loss, fewer than the claim allows
    "old",  # ended long enough ago
    "partly",  # more of the journal is to follow
    "unheld",  # restored in part, and so under no claim
]

Effect: TypeAlias = Literal[
    "enter",  # the row is there, last in submit order, under its id and key
    "next attempt",  # attempt + 1
    "hold",  # worker, holder, poll, lease and loss budget are the claim's; nothing waits any more
    "start",  # started_at is now
    "renew",  # a claim with a lease has it anew from now on
    "revive",  # the loss is taken back, and the lease, if there is one, begins anew
    "ask",  # cancellation is asked for
    "write",  # the frames that are not there, and the final mark
    "acked",  # result and error are the ack's
    "final frame",  # the ack's, at its seq or the next free one, unless the journal is closed
    "lose",  # lost + 1
    "fail",  # failures + 1, the error is kept for people
    "delay",  # not due before now + delay
    "let go",  # no worker, no lease, no request to cancel
    "cancelled queued",  # the error of a row that never started
    "cancelled running",  # the error of one that did
    "worker lost",  # the error of one that was lost too often
    "error frame",  # that error as the journal's final frame, unless it is closed
    "end",  # finished_at is now
    "delete",  # the row, its outcome, its journal; id and key are free
    "restore",  # the row is there as the operation says it, with the frames that are not there; new, it is last in order
]


class Rule(NamedTuple):
    """One line: how the row stands, what comes, under which conditions; where it goes (None: nowhere), what else changes.

    `to` names a state, or `lapsed`, `absent`, or `acked` and `restored`: the state that the ack or the restore carries.
    """

    standing: Standing
    event: Event
    when: tuple[Condition, ...]
    to: str | None
    effects: tuple[Effect, ...] = ()


_KILL: tuple[Effect, ...] = ("cancelled running", "error frame", "end")

_RULES = (
    Rule("absent", "submit", ("key taken",), None),
    Rule("absent", "submit", (), "queued", ("enter",)),
    Rule("queued", "claim", ("due", "renumbers"), "running", ("next attempt", "hold", "start")),
    Rule("queued", "cancel", (), "killed", ("cancelled queued", "error frame", "end")),
    Rule("running", "again", ("same poll",), "running", ("renew",)),
    Rule("running", "beat", ("fence",), "running", ("renew",)),
    Rule("running", "append", ("fence", "open", "unwritten"), "running", ("write",)),
    Rule("running", "finish", ("fence",), "acked", ("acked", "final frame", "end")),
    Rule("running", "release", ("fence", "asked"), "killed", _KILL),
    Rule("running", "release", ("fence",), "queued", ("let go",)),
    Rule("running", "retry", ("fence", "asked"), "killed", _KILL),
    Rule("running", "retry", ("fence",), "queued", ("fail", "delay", "let go")),
    Rule("running", "cancel", ("leased",), "running", ("ask",)),
    Rule("running", "cancel", (), "killed", _KILL),
    Rule("running", "expire", ("expired", "asked"), "killed", _KILL),
    Rule("running", "expire", ("expired", "uncounted"), "queued", ("let go",)),
    Rule("running", "expire", ("expired", "budget"), "lapsed", ("lose",)),
    Rule("running", "expire", ("expired",), "failed", ("lose", "worker lost", "error frame", "end")),
    Rule("ended", "finish", ("own",), None),
    Rule("ended", "cancel", (), None),
    Rule("ended", "purge", ("old",), "absent", ("delete",)),
    Rule("absent", "restore", ("key taken",), None),
    Rule("absent", "restore", ("partly",), "running", ("restore",)),
    Rule("absent", "restore", (), "restored", ("restore",)),
    Rule("running", "restore", ("unheld", "partly"), "running", ("restore",)),
    Rule("running", "restore", ("unheld",), "restored", ("restore",)),
    Rule("queued", "restore", (), None),
    Rule("running", "restore", (), None),
    Rule("ended", "restore", (), None),
)

_LASTING: tuple[Standing, ...] = ("queued", "lapsed", "running", "ended")


def _table() -> Iterable[Rule]:
    # What came before comes first: a repeat is answered whatever became of the claim since.
    for standing in _LASTING:
        yield Rule(standing, "submit", (), None)
        yield Rule(standing, "append", ("all there",), None)
    for rule in _RULES:
        yield rule
        # A lapsed row is queued to all the world, and as if still running to the claim that it had. It is never asked
        # to end: such a row is killed when its claim expires.
        if rule.standing == "queued":
            yield rule._replace(standing="lapsed")
        elif rule.standing == "running" and "fence" in rule.when and "asked" not in rule.when:
            yield rule._replace(standing="lapsed", effects=("revive", *rule.effects))


TABLE = tuple(_table())
"""Every transition there is."""


def find_rule(
    table: Iterable[Rule], standing: Standing, event: Event, holds: Callable[[Condition], bool]
) -> Rule | None:
    """The first rule of `table` for this row and event whose conditions all hold, or None: the event is refused."""
    for rule in table:
        if rule.standing == standing and rule.event == event and all(map(holds, rule.when)):
            return rule
    return None
