"""Named checks: whole rows of other planes that are entered, and the copies that say how. For planes that are movable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ClaimLost, DispatchError, InvocationNotFound
from ..planes.contract.operations import Append, Cancel, Cancelled, Fence, Finish, Requeue, Restore, Submit
from ..planes.contract.records import Failure, Outcome
from ..planes.contract.store import Movable
from .lab import LONG, Lab, fence_of, rule
from .rows import NOWHERE

if TYPE_CHECKING:
    from ..planes.contract.store import Store
    from ..planes.plane import Plane

ERROR = Failure("E", "of the other plane", "trace")


async def is_movable(plane: Plane) -> bool:
    """Whether invocations can be moved to and from this plane."""

    async def look(store: Store) -> bool:
        return isinstance(store, Movable)

    return await plane.read_store(look)


async def _cannot(lab: Lab) -> bool:
    """Whether there is nothing to check, since the plane is not movable; it then says so, and changes nothing."""
    if await is_movable(lab.plane):
        return False
    await lab.refuses(_restore("r"), DispatchError)
    lab.same("the outcome", await lab.plane.current_outcomes(["r"]), [Outcome("r", "unknown")])
    return True


def _restore(id: str, state: str = "queued", **fields: Any) -> Restore:
    """A row that has been tried once, in queue `q`."""
    plain: dict[str, Any] = {
        "queue": "q", "body": b"body of " + id.encode(), "key": None, "priority": 0, "parent": None, "root": None,
        "config": None, "attempt": 1, "failures": 1, "lost": 0, "worker": None, "submitted_at": 500_000.0,
        "not_before": None, "started_at": 500_001.0, "finished_at": None if state == "queued" else 500_002.0,
        "result": None, "error": None,
    }  # fmt: skip
    return Restore(id=id, state=state, **plain | fields)


async def _copies(lab: Lab, after: str | None = None, *queues: str, limit: int = 100) -> list[Restore]:
    """What the plane says would restore its rows."""

    async def look(store: Any) -> list[Restore]:
        found: list[Restore] = await store.copies(after, queues, limit, 1 << 20)
        return found

    return await lab.plane.read_store(look)


async def _journal(
    lab: Lab, id: str, since: int, limit: int = 100, max_bytes: int = 1 << 20
) -> list[tuple[int, bytes]]:
    async def look(store: Any) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = await store.journal(id, since, limit, max_bytes)
        return found

    return await lab.plane.read_store(look)


@rule
async def a_restored_row_that_ended_stands_as_it_did(lab: Lab) -> None:
    """A row that is restored as ended has the state, result, error, journal and times given, and never changes again."""
    if await _cannot(lab):
        return
    for state, result, error in [("succeeded", b"result", None), ("failed", None, ERROR), ("killed", None, ERROR)]:
        id, frames = f"i-{state}", ((0, b"a"), (1, b"END"))
        op = _restore(id, state, attempt=3, worker="v", lost=1, key=id, parent="p", root="r", priority=-4,
                      result=result, error=error, frames=frames)  # fmt: skip
        lab.same("the answer", await lab.plane.do(op), id)
        lab.same("the outcome", await lab.plane.current_outcomes([id]), [Outcome(id, state, result, error)])
        await lab.stands(id, state=state, queue="q", key=id, attempt=3, failures=1, lost=1, worker="v", parent="p")
        await lab.stands(id, root="r", priority=-4, submitted_at=500_000.0, finished_at=500_002.0, trusted=False)
        page = await lab.journal(id, [*frames], True)
        lab.same("state and error of the page", (page.state, page.error), (state, error))
        for fence in (Fence(id, "v", 3), Fence(id, "v"), Fence(id)):
            await lab.refuses(Finish(fence, state, result, error), ClaimLost)
            for seq in (1, 2):
                await lab.refuses(Append(fence, seq, (b"late",)), ClaimLost)
        lab.same("the answer to a cancel", await lab.plane.do(Cancel(id)), Cancelled("terminal"))
    lab.same("what a claim finds", await lab.claim_ids(), [])
    ended = {("q", state): 1 for state in ("succeeded", "failed", "killed")}
    lab.same("counts", await lab.plane.counts(), ended)


@rule
async def a_purge_goes_by_the_end_that_a_restore_names(lab: Lab) -> None:
    """A purge deletes restored rows by when they ended, in whatever order they were restored; their keys are free then."""
    if await _cannot(lab):
        return
    now = (await lab.stands(await lab.submit(id="now"))).submitted_at
    for n, age in enumerate((1.0, 900.0, 2.0, 800.0)):
        await lab.plane.do(_restore(f"i{n}", "succeeded", key=f"k{n}", finished_at=now - age, frames=((0, b"END"),)))
    lab.same("rows purged", await lab.plane.purge(LONG), 2)
    states = [one.state for one in await lab.plane.current_outcomes(["i0", "i1", "i2", "i3"])]
    lab.same("what is left", states, ["succeeded", "unknown", "succeeded", "unknown"])
    lab.same("the answer to a submit with the key", await lab.plane.do(Submit("new", "q", b"", "k1")), "new")


@rule
async def a_restored_row_that_is_queued_goes_on(lab: Lab) -> None:
    """A row that is restored as queued is claimed in its turn, untrusted, with its budgets, and numbers frames on."""
    if await _cannot(lab):
        return
    now = (await lab.stands(await lab.submit(id="here"))).submitted_at
    await lab.plane.do(_restore("second", config=b"c", parent="p", root="r", lost=2, attempt=4, error=ERROR,
                                frames=((0, b"a"), (2, b"c"))))  # fmt: skip
    await lab.plane.do(_restore("first", priority=1, submitted_at=now))
    await lab.plane.do(_restore("third", not_before=now - 1.0, attempt=0, failures=0, started_at=None))
    await lab.plane.do(_restore("later", not_before=now + LONG, priority=9))
    row = await lab.stands(
        "second", state="queued", worker=None, trusted=False, failures=1, lost=2, attempt=4, root="r"
    )
    lab.same("the error and the time of the row", (row.error, row.submitted_at), (ERROR, 500_000.0))
    await lab.stands("later", not_before=now + LONG)
    await lab.refuses(Finish(Fence("second", "v", 4), "succeeded"), ClaimLost)
    claims = [await lab.claim() for _ in range(4)]
    lab.same("the order of the claims", [one.id for one in claims], ["first", "here", "second", "third"])
    second = claims[2]
    came = (second.attempt, second.failures, second.lost, second.next_seq, second.trusted, second.config, second.parent)
    lab.same("the claim", came, (5, 1, 2, 3, False, b"c", "p"))
    lab.same("what is left for a claim", await lab.claim_ids(), [])
    await lab.refuses(Append(fence_of(second), 2, (b"other",)), ClaimLost)
    await lab.plane.do(Append(fence_of(second), 3, (b"d",)))
    await lab.plane.do(Finish(fence_of(second), "succeeded"))
    await lab.journal("second", [(0, b"a"), (2, b"c"), (3, b"d")], True)


@rule
async def a_restore_never_touches_what_is_there(lab: Lab) -> None:
    """A restore of an id or key that is there answers the id that holds, and changes nothing, whatever the row's state."""
    if await _cannot(lab):
        return
    await lab.refuses(_restore("odd", "running"), ValueError)
    id = await lab.submit(key="k")
    lab.same("the answer for a key that is taken", await lab.plane.do(_restore("other", "failed", key="k")), id)
    lab.same("how the other id stands", await lab.plane.current_outcomes(["other"]), [Outcome("other", "unknown")])

    async def repeat(state: str) -> None:
        before = await lab.stands(id, state=state)
        for op in (_restore(id, "failed", error=ERROR, frames=((7, b"x"),)), _restore(id, more=True)):
            lab.same(f"the answer to a restore while {state}", await lab.plane.do(op), id)
        lab.same("the row after it", await lab.row(id), before)
        lab.same("its journal", await _journal(lab, id, -1), [])

    await lab.in_each_state(repeat)


@rule
async def a_row_is_restored_in_parts(lab: Lab) -> None:
    """A row whose journal comes with several restores is nobody's to claim until the last; parts may come again."""
    if await _cannot(lab):
        return
    for id, state in (("goes-on", "queued"), ("ended", "failed")):
        parts = [_restore(id, state, error=ERROR, worker=None if state == "queued" else "v", frames=(frame,), more=True)
                 for frame in ((0, b"a"), (1, b"b"), (4, b"c"))]  # fmt: skip
        parts[2] = parts[2]._replace(more=False)
        for part in (parts[0], parts[1], parts[0], parts[1]):
            lab.same("the answer", await lab.plane.do(part), id)
            (outcome,) = await lab.plane.current_outcomes([id])
            lab.same("that the row has not ended", outcome.state in ("pending", "unknown"), True)
            lab.same("what a claim finds", await lab.claim_ids(), [])
        for _ in range(2):
            lab.same("the answer", await lab.plane.do(parts[2]), id)
        await lab.stands(id, state=state, error=ERROR, attempt=1, worker=parts[2].worker)
        lab.same("the journal", await _journal(lab, id, -1), [(0, b"a"), (1, b"b"), (4, b"c")])
        if state == "queued":
            lab.same("where the next frames begin", (await lab.claim()).next_seq, 5)
    await lab.journal("ended", [(0, b"a"), (1, b"b"), (4, b"c")], True)


@rule
async def copies_say_what_restores_a_row(lab: Lab) -> None:
    """Copies come in submit order, of the queues named, and say of each row, running too, what would restore it."""
    if await _cannot(lab):
        return
    ended = _restore("ended", "succeeded", priority=7, worker="v", result=b"r", frames=((0, b"END"),), closed=True)
    queued = _restore("queued", queue="p", config=b"c", key="k", error=ERROR, frames=((0, b"a"), (2, b"c")))
    for op in (ended, queued):
        await lab.plane.do(op)
    claimed = await lab.start(parent="ended")
    await lab.plane.do(Append(fence_of(claimed), 1, (b"b",)))
    copies = await _copies(lab)
    lab.same("the ids", [one.id for one in copies], ["ended", "queued", claimed.id])
    lab.same("the first two", copies[:2], [ended, queued])
    running = copies[2]
    lab.same("the state of the third", (running.state, running.worker, running.attempt), ("running", "w", 1))
    came = (running.body, running.parent, running.root, running.frames, running.more)
    lab.same("the rest of it", came, (claimed.body, "ended", "ended", ((1, b"b"),), False))
    lab.same("after the first, of one queue", [one.id for one in await _copies(lab, "ended", "q")], [claimed.id])
    lab.same("one at a time", [one.id for one in await _copies(lab, None, "q", "p", limit=1)], ["ended"])
    lab.same("after the last", await _copies(lab, claimed.id), [])
    lab.same("a journal after frame 0", await _journal(lab, "queued", 0), [(2, b"c")])
    lab.same("a journal, by frames", await _journal(lab, "queued", -1, limit=1), [(0, b"a")])
    lab.same("a journal, by bytes", await _journal(lab, "queued", -1, max_bytes=1), [(0, b"a")])
    await lab.plane.do(Requeue(fence_of(claimed)))
    (again,) = await _copies(lab, "queued")
    lab.same("state and worker after a release", (again.state, again.worker), ("queued", None))
    for look in (_copies(lab, NOWHERE), _journal(lab, NOWHERE, -1)):
        try:
            came_all: Any = await look
        except InvocationNotFound:
            continue
        lab.same("what comes for an id that is not there", came_all, InvocationNotFound)
