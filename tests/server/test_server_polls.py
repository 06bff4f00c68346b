"""Held requests: who ends them, what becomes of claims on their way to a client that is gone, and the server's end."""

from __future__ import annotations

import logging
import random
import socket
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import server_kit
from anyio.lowlevel import checkpoint
from helpers import quiet, wait_until
from server_kit import PATIENCE, Asked, client_of, served

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import PlaneUnavailable
from dreamlake.lakeshore.planes.contract.operations import Claim, Fence, Operation
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter
from dreamlake.lakeshore.server.app import create_app
from dreamlake.lakeshore.server.limits import Limits
from dreamlake.lakeshore.server.polls import MAX_RELEASED_NAMES, MAX_WORKERS, RELEASED_NAME_LIFETIME, Polls, Renewals
from dreamlake.lakeshore.server.tokens import TokenFile, create_token, revoke_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

plane, client = server_kit.plane, server_kit.client

POLL, RELEASE, HEARTBEAT = "/v1/daemon/poll", "/v1/daemon/release", "/v1/daemon/heartbeat"
AWAIT, AWAIT_MANY = "/v1/producer/await", "/v1/producer/await-many"


@asynccontextmanager
async def asking(*requests: Asked) -> AsyncIterator[None]:
    """The requests under way; they must be over when the block is left."""
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(request.run)
        yield
        for request in requests:
            await request.over()


def poll_of(worker: str = "w", **more: Any) -> dict[str, Any]:
    return {"worker_id": worker, "queue": "q", "timeout_s": PATIENCE, **more}


def ids_of(fields: dict[str, Any]) -> list[tuple[str, int]]:
    return [(command["body"]["invocation_id"], command["body"]["attempt"]) for command in fields["commands"]]


async def held(app: Any, count: int) -> None:
    """Wait until so many requests are held, and wait for something."""
    polls = app.endpoint.service.polls
    await wait_until(lambda: len(polls) == count, description=f"{count} held requests")
    await anyio.wait_all_tasks_blocked()


async def state_of(plane: Any, id: str) -> tuple[str, int, int, int]:
    (row,) = await plane.rows(RowFilter(id=id))
    return row.state, row.attempt, row.failures, row.lost


class Gated(dls.Dispatch):
    """A plane whose first claim waits at a gate: made by then, so that only its answer does not come, or not (`late`)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate, self.claimed = anyio.Event(), anyio.Event()
        self.gated, self.late = True, False

    async def do(self, op: Operation) -> Any:
        gated = self.gated and isinstance(op, Claim) and op.limit > 0
        self.gated = self.gated and not gated
        answer = None if gated and self.late else await super().do(op)
        if gated:
            self.claimed.set()
            await self.gate.wait()
        return await super().do(op) if answer is None else answer

    async def many(self, ops: Sequence[Operation]) -> list[Any]:
        await checkpoint()
        return await super().many(ops)


@pytest.fixture
async def gated(tmp_path: Path) -> AsyncIterator[Gated]:
    async with Gated(tmp_path / "plane.db") as plane:
        yield plane


class Keys:
    """Tokens of workers, `old` and `new`, and one of a producer; changes of the file are seen at once."""

    def __init__(self, path: Path) -> None:
        self.path, self._looks = path, count()
        roles = {"old": "worker", "new": "worker", "producer": "producer"}
        self._of = {name: create_token(path, name, role, "default") for name, role in roles.items()}
        self.file = TokenFile(path, clock=lambda: 10.0 * next(self._looks))

    def __getitem__(self, name: str) -> str:
        return f"Bearer {self._of[name]}"

    def revoke(self, name: str) -> None:
        assert revoke_token(self.path, name)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "tokens")


UNKNOWN = (401, "NotAuthorized", "expected a token, `Authorization: Bearer ...`, got one that is not known here")


# --- turns ------------------------------------------------------------------------------------------------------------


async def test_a_newer_turn_of_the_same_name_ends_the_older_ones_and_waits_for_their_end() -> None:
    polls = Polls(10)
    order: list[str] = []

    async def work(name: str, last: bool) -> None:
        with polls.hold(("a",)) as turn:
            alone = await turn.wait_for_older()
            if not last:
                await turn.wait_for(anyio.sleep_forever)
            order.append(f"{name} {alone} {turn.ended} {turn.dropped}")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            for name in ("one", "two", "three"):
                group.start_soon(work, name, name == "three")
                await anyio.wait_all_tasks_blocked()
    assert order == ["one True True True", "two True True True", "three True False False"]
    assert len(polls) == 0


async def test_a_turn_that_is_ended_while_it_waits_for_older_ones_is_followed_by_none_before_those() -> None:
    """The middle one leaves at once; the newest waits for the oldest all the same."""
    polls = Polls(10)
    order: list[str] = []
    through = anyio.Event()

    async def work(name: str) -> None:
        with polls.hold(("a",)) as turn:
            if name == "one":
                with anyio.CancelScope(shield=True):
                    await through.wait()
            alone = await turn.wait_for_older()
        order.append(f"{name} {alone}")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            for name in ("one", "two", "three"):
                group.start_soon(work, name)
                await anyio.wait_all_tasks_blocked()
            assert order == ["two False"]
            through.set()
    assert order == ["two False", "one False", "three True"]


async def test_turns_of_other_names_and_without_one_do_not_end_each_other() -> None:
    polls = Polls(10)
    with (
        polls.hold(("a", "1")) as first,
        polls.hold(("a", "2")) as second,
        polls.hold() as third,
        polls.hold() as fourth,
    ):
        assert not any(turn.ended for turn in (first, second, third, fourth))
        await polls.release(("b",))
        assert not any(turn.ended for turn in (first, second, third, fourth))


async def test_hold_gives_what_was_waited_for_and_raises_what_it_raised() -> None:
    polls = Polls(10)

    async def fails() -> None:
        raise ValueError("as it is")

    async def gives() -> int:
        return 7

    with polls.hold() as turn:
        assert await turn.wait_for(gives) == 7
        with pytest.raises(ValueError, match="as it is"):
            await turn.wait_for(fails)
        turn.end()
        assert await turn.wait_for(gives) is None


async def test_more_turns_than_there_may_be_are_refused_and_a_turn_that_is_over_makes_room() -> None:
    polls = Polls(2)
    with polls.hold(("a",)), polls.hold():
        with pytest.raises(PlaneUnavailable) as caught, polls.hold(("a",)):
            pass
        assert str(caught.value) == "the server already holds 2 requests, its maximum: retry later"
    with polls.hold(), polls.hold(("a",)) as turn:
        assert not turn.ended


async def test_a_released_name_is_remembered_for_a_minute_and_not_longer() -> None:
    now = 0.0
    polls = Polls(10, clock=lambda: now)
    await polls.release(("a",))
    assert polls.released(("a",))
    assert not polls.released(("b",))
    now = RELEASED_NAME_LIFETIME - 1
    assert polls.released(("a",))
    await polls.release(("a",))
    now = RELEASED_NAME_LIFETIME + 1
    assert polls.released(("a",))
    now = 2 * RELEASED_NAME_LIFETIME
    assert not polls.released(("a",))
    await polls.release(("c",))
    assert list(polls._released) == [("c",)]


async def test_the_memory_for_released_names_is_bounded() -> None:
    polls = Polls(10)
    for number in range(MAX_RELEASED_NAMES + 10):
        await polls.release((str(number),))
    assert len(polls._released) == MAX_RELEASED_NAMES
    assert polls.released((str(MAX_RELEASED_NAMES + 9),))
    assert not polls.released(("9",))


async def test_draining_ends_every_turn_and_those_to_come() -> None:
    polls = Polls(10)
    with polls.hold() as turn:
        polls.drain()
        assert (turn.ended, turn.dropped) == (True, False)
    with polls.hold(("a",)) as turn:
        assert (turn.ended, turn.dropped) == (True, False)
    with anyio.fail_after(PATIENCE):
        await polls.idle()


async def test_a_worker_s_renewals_are_late_after_half_a_lease_and_fresh_when_it_is_new_here() -> None:
    now = 0.0
    renewals = Renewals(clock=lambda: now)
    assert not renewals.late(("ns", "w"), 4.0)
    now = 2.0
    assert not renewals.late(("ns", "w"), 4.0)
    now = 2.1
    assert renewals.late(("ns", "w"), 4.0)
    assert not renewals.late(("other", "w"), 4.0)
    renewals.renewed(("ns", "w"))
    assert not renewals.late(("ns", "w"), 4.0)
    for number in range(MAX_WORKERS):
        renewals.renewed(("ns", str(number)))
    assert len(renewals._seen) == MAX_WORKERS
    assert ("ns", "w") not in renewals._seen


async def test_a_held_poll_gives_nothing_to_a_worker_that_has_not_renewed_its_claims(plane: dls.Dispatch) -> None:
    """What has become free in its time may be its own; who waits behind it has it, and so has it after a renewal."""
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    terms = {"lease_s": 0.6, "max_commands": 1}
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p0", **terms))) == [("a", 1)]
    silent, other = Asked(app, POLL, poll_of(poll_id="p1", busy=True, **terms)), Asked(app, POLL, poll_of("other"))
    async with asking(silent, other):
        await held(app, 2)
        await wait_until(lambda: silent.complete, description="the end of the lease")
        assert ids_of(await silent.fields()) == []
        await other.over()
        assert ids_of(await other.fields()) == [("a", 2)]
    for number in range(2):
        await plane.submit("q", b"x", id=f"b{number}")
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p2", busy=True, **terms))) == []
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p3", **terms))) == [("b0", 1)]
    beat = {"worker_id": "w", "claims": [["b0", 1]], "lease_s": 30.0}
    await ask(app, HEARTBEAT, beat)
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p4", busy=True, **terms | {"lease_s": 30.0}))) == [("b1", 1)]


async def test_what_a_poll_took_is_given_again_however_late_its_worker_is(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    for number in range(2):
        await plane.submit("q", b"x", id=f"a{number}")
    terms = {"lease_s": 30.0, "poll_id": "p", "busy": True}
    assert ids_of(await ask(app, POLL, poll_of(**terms))) == [("a0", 1)]
    app.endpoint.service.renewals._seen["default", "w"] -= 16.0
    assert ids_of(await ask(app, POLL, poll_of(**terms))) == [("a0", 1)]
    assert ids_of(await ask(app, POLL, poll_of(**terms | {"poll_id": "p2"}))) == []


# --- clients that leave -----------------------------------------------------------------------------------------------


async def test_a_held_request_whose_client_leaves_ends_at_once(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    await plane.submit("other", b"x", id="a")
    requests = [
        Asked(app, POLL, poll_of()),
        Asked(app, POLL, poll_of(poll_id="p")),
        Asked(app, AWAIT, {"invocation_id": "a", "timeout_s": PATIENCE}),
        Asked(app, AWAIT_MANY, {"items": [{"invocation_id": "a"}], "timeout_s": PATIENCE}),
        Asked(app, HEARTBEAT, {"worker_id": "w", "wait_s": PATIENCE}),
        Asked(app, "/v1/producer/invocations/a/result/stream"),
    ]
    async with asking(*requests):
        await held(app, len(requests))
        for request in requests:
            request.leave()
        for request in requests:
            await request.over()
        assert len(app.endpoint.service.polls) == 0
    assert [request.status for request in requests[:5]] == [0] * 5
    assert not any(request.complete for request in requests)


async def test_R35_a_poll_whose_client_left_takes_nothing_from_those_that_come_after(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    for number in range(20):
        request = Asked(app, POLL, poll_of())
        async with asking(request):
            await held(app, 1)
            request.leave()
        await plane.submit("q", b"x", id=f"a{number}")
        assert ids_of(await ask(app, POLL, poll_of())) == [(f"a{number}", 1)]


async def ask(app: Any, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = Asked(app, path, fields)
    async with asking(request):
        pass
    found: dict[str, Any] = await request.fields()
    return found


async def test_what_a_poll_without_an_id_claimed_in_the_moment_its_client_left_goes_back_at_once(gated: Gated) -> None:
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    request = Asked(app, POLL, poll_of())
    async with asking(request):
        await gated.claimed.wait()
        request.leave()
        await anyio.wait_all_tasks_blocked()
        assert await state_of(gated, "a") == ("running", 1, 0, 0)
        gated.gate.set()
    assert not request.chunks
    assert await state_of(gated, "a") == ("queued", 1, 0, 0)
    assert ids_of(await ask(app, POLL, poll_of("other"))) == [("a", 2)]


class Deaf(Asked):
    """One whose server fails with `said` when something is sent to a client that has gone."""

    said: Exception

    async def send(self, message: Any) -> None:
        if self.disconnected:
            raise self.said
        await super().send(message)


@pytest.mark.parametrize("said", [OSError("nobody hears"), RuntimeError("the handler is closed")], ids=repr)
async def test_a_claim_goes_back_when_the_client_is_found_gone_by_sending(
    gated: Gated, said: Exception, caplog: Any
) -> None:
    """A server that says so by an error of `send`, as uvloop does, and nothing before."""
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    request = Deaf(app, POLL, poll_of())
    request.said, receive = said, request.receive

    async def told_nothing() -> dict[str, Any]:
        message = await receive()
        if message["type"] == "http.disconnect":
            await anyio.sleep_forever()
        return message

    request.receiving = told_nothing
    async with asking(request):
        await gated.claimed.wait()
        request.leave()
        gated.gate.set()
    assert await state_of(gated, "a") == ("queued", 1, 0, 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_is_found_gone_by_sending_the_end_of_its_answer_is_no_failure(
    plane: dls.Dispatch, caplog: Any
) -> None:
    class Late(Asked):
        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                raise RuntimeError("the handler is closed")
            await super().send(message)

    await Late(create_app(plane), "/v1/producer/queues").run()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_claim_goes_back_when_the_request_itself_is_cancelled(gated: Gated) -> None:
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    async with anyio.create_task_group() as group:
        group.start_soon(Asked(app, POLL, poll_of()).run)
        await gated.claimed.wait()
        group.cancel_scope.cancel()
        gated.gate.set()
    assert await state_of(gated, "a") == ("queued", 1, 0, 0)


async def test_a_claim_whose_answer_cannot_be_made_goes_back(plane: dls.Dispatch, monkeypatch: Any) -> None:
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    exchange = "dreamlake.lakeshore.server.app._Exchange._encoded"
    monkeypatch.setattr(exchange, lambda self, fields: (_ for _ in ()).throw(ValueError("no bytes")))
    request = Asked(app, POLL, poll_of())
    with pytest.raises(ValueError, match="no bytes"):
        await request.run()
    assert await state_of(plane, "a") == ("queued", 1, 0, 0)


async def test_of_a_poll_with_an_id_nothing_is_given_back_and_its_repeat_has_it(gated: Gated) -> None:
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    request = Asked(app, POLL, poll_of(poll_id="p", lease_s=30.0))
    async with asking(request):
        await gated.claimed.wait()
        request.leave()
        gated.gate.set()
    assert await state_of(gated, "a") == ("running", 1, 0, 0)
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p", lease_s=30.0))) == [("a", 1)]


async def test_a_claim_that_comes_as_the_time_is_up_is_answered(gated: Gated) -> None:
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    request = Asked(app, POLL, poll_of(poll_id="p", timeout_s=0.02))
    async with asking(request):
        await gated.claimed.wait()
        until = anyio.current_time() + 0.05
        await wait_until(lambda: anyio.current_time() > until, description="the end of the poll's time")
        gated.gate.set()
    assert ids_of(await request.fields()) == [("a", 1)]


@pytest.mark.parametrize("poll_id", [None, "p"])
async def test_no_job_is_swallowed_or_run_twice_whenever_the_client_leaves(
    plane: dls.Dispatch, poll_id: str | None
) -> None:
    """The client leaves at every step of its poll: what it was not told of is there for the next, and told once."""
    app = create_app(plane)
    for steps in range(25):
        id = f"a{steps}"
        await plane.submit("q", b"x", id=id)
        first = Asked(app, POLL, poll_of(poll_id=poll_id and f"{poll_id}{steps}", lease_s=30.0))
        async with asking(first):
            for _ in range(steps):
                await checkpoint()
            first.leave()
        told = ids_of(await first.fields()) if first.complete else []
        again = ids_of(
            await ask(app, POLL, poll_of(poll_id=poll_id and f"{poll_id}{steps}", lease_s=30.0, timeout_s=0))
        )
        if told and poll_id is None:
            assert again == []
        elif told:
            assert again == told
        else:
            assert [found for found, _ in again] == [id]
        ((_, attempt),) = told or again
        await plane.finish(Fence(id, "w", attempt), "succeeded")


# --- polls that follow each other -------------------------------------------------------------------------------------


async def test_a_repeat_ends_the_older_poll_with_nothing_and_waits_on(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    first, second, third = (Asked(app, POLL, poll_of(poll_id="p")) for _ in range(3))
    async with asking(first):
        await held(app, 1)
        async with asking(second):
            assert ids_of(await first.fields()) == []
            async with asking(third):
                assert ids_of(await second.fields()) == []
                await plane.submit("q", b"x", id="a")
    assert ids_of(await third.fields()) == [("a", 1)]


@pytest.mark.parametrize("late", [False, True])
async def test_a_repeat_waits_for_the_claim_of_the_older_poll_and_has_it_alone(gated: Gated, late: bool) -> None:
    app = create_app(gated)
    gated.late = late
    for id in ("a", "b"):
        await gated.submit("q", b"x", id=id)
    first, second, third = (Asked(app, POLL, poll_of(poll_id="p", lease_s=30.0)) for _ in range(3))
    async with asking(first):
        await gated.claimed.wait()
        async with asking(second):
            await held(app, 2)
            async with asking(third):
                await held(app, 2)  # the second has left: it was told to while it waited for the first
                assert await second.fields() == {"commands": []}
                assert not third.complete
                gated.gate.set()
    assert ids_of(await first.fields()) == []
    assert ids_of(await third.fields()) == [("a", 1)]
    assert await state_of(gated, "b") == ("queued", 0, 0, 0)


async def test_polls_of_other_workers_and_namespaces_are_not_repeats(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    requests = [
        Asked(app, POLL, poll_of(poll_id="p")),
        Asked(app, POLL, poll_of("other", poll_id="p")),
        Asked(app, POLL, poll_of(poll_id="p2")),
        Asked(app, "/v1/namespaces/ns2" + POLL.removeprefix("/v1"), poll_of(poll_id="p")),
        Asked(app, POLL, poll_of()),
        Asked(app, POLL, poll_of()),
    ]
    async with asking(*requests):
        await held(app, len(requests))
        app.drain()
    await app.endpoint.close()


@pytest.mark.parametrize("late", [False, True])
async def test_a_release_waits_for_the_claim_under_way_and_gives_it_back(gated: Gated, late: bool) -> None:
    app = create_app(gated)
    gated.late = late
    await gated.submit("q", b"x", id="a")
    first = Asked(app, POLL, poll_of(poll_id="p", lease_s=30.0))
    release = Asked(app, RELEASE, {"worker_id": "w", "poll_id": "p"})
    async with asking(first):
        await gated.claimed.wait()
        async with asking(release):
            await anyio.wait_all_tasks_blocked()
            assert not release.complete
            gated.gate.set()
    assert await first.fields() == {"commands": []}
    assert await release.fields() == {"results": [{"state": "queued", "queue": "q", "delayed": False}]}
    assert await state_of(gated, "a") == ("queued", 1, 0, 0)


async def test_a_poll_that_its_release_has_overtaken_takes_nothing(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    assert await ask(app, RELEASE, {"worker_id": "w", "poll_id": "p"}) == {"results": []}
    assert await ask(app, POLL, poll_of(poll_id="p")) == {"commands": []}
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p2"))) == [("a", 1)]


async def test_a_release_of_a_poll_leaves_the_leases_of_what_it_cannot_give_back(
    plane: dls.Dispatch, monkeypatch: Any
) -> None:
    """Asking which claims a poll holds must not make them last for ever."""
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    assert ids_of(await ask(app, POLL, poll_of(poll_id="p", lease_s=5.0))) == [("a", 1)]

    async def fail(ops: Any) -> Any:
        raise PlaneUnavailable("just now")

    monkeypatch.setattr(plane, "many", fail)
    release = Asked(app, RELEASE, {"worker_id": "w", "poll_id": "p"})
    await release.run()
    assert (await release.answer()).status == 503
    (row,) = await plane.rows(RowFilter(id="a"))
    assert row.lease_until is not None


async def test_of_two_await_manys_with_the_same_watch_the_newer_goes_on(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    for id in ("a", "b"):
        await plane.submit("q", b"x", id=id)
    fields = {"items": [{"invocation_id": "a"}], "timeout_s": PATIENCE, "watch": "one"}
    first, other = Asked(app, AWAIT_MANY, fields), Asked(app, AWAIT_MANY, fields | {"watch": "two"})
    second = Asked(app, AWAIT_MANY, fields | {"items": [{"invocation_id": "a"}, {"invocation_id": "b"}]})
    async with asking(other, first):
        await held(app, 2)
        async with asking(second):
            await held(app, 2)
            assert await first.fields() == {"results": [], "pages": []}
            assert not other.complete
            await plane.cancel("a")
    for request in (second, other):
        ((id, answer),) = (await request.fields())["results"]
        assert (id, answer["state"]) == ("a", "killed")


# --- many polls for the same ------------------------------------------------------------------------------------------


class Counting(dls.Dispatch):
    claims = 0

    async def do(self, op: Operation) -> Any:
        self.claims += isinstance(op, Claim)
        return await super().do(op)


async def test_one_job_wakes_one_of_many_polls_and_not_all_of_them(tmp_path: Path) -> None:
    async with Counting(tmp_path / "plane.db") as plane:
        app = create_app(plane)
        requests, ids = [Asked(app, POLL, poll_of(f"w{number}")) for number in range(30)], list[str]()
        async with asking(*requests):
            await held(app, 30)
            for number in range(30):
                before = plane.claims
                ids.append(await plane.submit("q", b"x", id=f"a{number}"))
                await wait_until(lambda: sum(one.complete for one in requests) == len(ids), description="the answer")
                assert (
                    plane.claims - before <= 6
                )  # one that takes it, and one that looks after it; the watcher tells at times
        assert app.endpoint.service.polls._shared_waits == {}
    answers = [ids_of(await request.fields()) for request in requests]
    assert sorted(answers) == sorted([(f"a{number}", 1)] for number in range(30))


async def test_many_jobs_at_once_reach_as_many_polls(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    requests = [Asked(app, POLL, poll_of(f"w{number}")) for number in range(30)]
    async with asking(*requests):
        await held(app, 30)
        await plane.many([plane.submission("q", b"x", id=f"a{number}") for number in range(30)])
    answers = [ids_of(await request.fields()) for request in requests]
    assert sorted(answers) == sorted([(f"a{number}", 1)] for number in range(30))


async def test_whoever_leaves_the_first_place_hands_it_on(plane: dls.Dispatch) -> None:
    """By its client's leaving, its time, its repeat and its release; the last one has the job."""
    app = create_app(plane)
    leaver, short = Asked(app, POLL, poll_of("leaver")), Asked(app, POLL, poll_of("short", timeout_s=0.5))

    async def in_place(count: int) -> None:
        """So many are held; the short one's time may be over before the last has come, on a machine that stands still."""
        polls = app.endpoint.service.polls
        await wait_until(lambda: len(polls) == count - short.complete, description=f"{count} held requests")
        await anyio.wait_all_tasks_blocked()

    async with asking(leaver):
        await held(app, 1)
        repeated = Asked(app, POLL, poll_of("repeated", poll_id="p"))
        released = Asked(app, POLL, poll_of("released", poll_id="p"))
        behind = Asked(app, POLL, poll_of("behind"))
        last = Asked(app, POLL, poll_of("last"))
        async with asking(short):
            await in_place(2)
            async with asking(repeated):
                await in_place(3)
                async with asking(released):
                    await in_place(4)
                    async with asking(behind):
                        await in_place(5)
                        async with asking(last):
                            await in_place(6)
                            behind.leave()  # from its place in the line
                            leaver.leave()
                            assert await short.fields() == {"commands": []}
                            again = await ask(app, POLL, poll_of("repeated", poll_id="p", timeout_s=0))
                            assert again == await repeated.fields() == {"commands": []}
                            await ask(app, RELEASE, {"worker_id": "released", "poll_id": "p"})
                            assert await released.fields() == {"commands": []}
                            await plane.submit("q", b"x", id="a")
    assert ids_of(await last.fields()) == [("a", 1)]


async def test_a_job_that_only_some_polls_may_take_reaches_one_of_those(plane: dls.Dispatch) -> None:
    """A row with frames is not for a poll without a lease, which was there first; other queues are other lines."""
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    assert ids_of(await ask(app, POLL, poll_of("first", lease_s=60.0))) == [("a", 1)]
    await plane.append(Fence("a", "first", 1), 0, [b"frame"])
    old, other = Asked(app, POLL, poll_of("old")), Asked(app, POLL, poll_of("other", queue="other", lease_s=60.0))
    both, leased = (
        Asked(app, POLL, poll_of("both", queues=["other", "q"], lease_s=60.0)),
        Asked(app, POLL, poll_of("leased", lease_s=60.0)),
    )
    async with asking(old, other):
        await held(app, 2)
        async with asking(leased):
            await held(app, 3)
            await plane.release(Fence("a", "first", 1))
            assert ids_of(await leased.fields()) == [("a", 2)]
        async with asking(both):
            await held(app, 3)
            await plane.submit("other", b"x", id="b")
            await wait_until(lambda: other.complete or both.complete, description="the second job")
            for request in (old, other, both):
                request.leave()
    assert not old.complete


async def test_a_server_judges_no_lease_before_it_has_served_for_its_length(tmp_path: Path) -> None:
    """Workers that could not reach it while it was down are given the time to come back."""
    now = 1e9

    def clock() -> float:
        return now

    async with dls.Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        await plane.submit("q", b"x", id="a")
        await plane.claim(["q"], "w", lease=10.0, local=False)
    now += 100.0
    plane = dls.Dispatch(tmp_path / "plane.db", clock=clock)
    app = create_app(plane)
    async with plane:
        store: Any = (await plane._engines.get()).store
        taker = Asked(app, POLL, poll_of("taker", lease_s=60.0))
        async with asking(taker):
            await wait_until(lambda: store._due_checks > 4, description="checks for what has become due")
            assert await state_of(plane, "a") == ("running", 1, 0, 0)
            now += 11.0
        assert ids_of(await taker.fields()) == [("a", 2)]


# --- heartbeats -------------------------------------------------------------------------------------------------------


async def test_a_held_heartbeat_is_answered_when_one_of_its_claims_is_given_back_by_somebody_else(
    plane: dls.Dispatch,
) -> None:
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    await ask(app, POLL, poll_of(lease_s=60.0))
    beat = Asked(app, HEARTBEAT, {"worker_id": "w", "claims": [["a", 1]], "lease_s": 60.0, "wait_s": PATIENCE})
    async with asking(beat):
        await held(app, 1)
        await plane.release(Fence("a", "w", 1))
    assert await beat.fields() == {"lost": [["a", 1]], "cancel": []}


async def test_a_heartbeat_is_held_no_longer_than_half_its_lease(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    await ask(app, POLL, poll_of(lease_s=60.0))
    with anyio.fail_after(PATIENCE):
        fields = {"worker_id": "w", "claims": [["a", 1]], "lease_s": 0.2, "wait_s": 100 * PATIENCE}
        assert await ask(app, HEARTBEAT, fields) == {"lost": [], "cancel": []}


async def test_a_heartbeat_without_claims_tells_every_cancellation_of_its_worker(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    for id in ("a", "b"):
        await plane.submit("q", b"x", id=id)
    await ask(app, POLL, poll_of(lease_s=60.0, max_commands=2))
    beat = Asked(app, HEARTBEAT, {"worker_id": "w", "wait_s": PATIENCE})
    async with asking(beat):
        await held(app, 1)
        await plane.cancel("b")
    assert await beat.fields() == {"lost": [], "cancel": [["b", 1]]}
    assert await ask(app, HEARTBEAT, {"worker_id": "w"}) == {"lost": [], "cancel": [["b", 1]]}
    fields = {"worker_id": "w", "known": [["b", 1]], "wait_s": 0.05}
    assert await ask(app, HEARTBEAT, fields) == {"lost": [], "cancel": [["b", 1]]}


# --- how many there may be --------------------------------------------------------------------------------------------


async def test_more_held_requests_than_the_limit_are_a_503_and_the_server_goes_on(plane: dls.Dispatch) -> None:
    app = create_app(plane, limits=Limits(polls=2))
    first, second = (Asked(app, POLL, poll_of()) for _ in range(2))
    async with asking(first, second), client_of(app) as client:
        await held(app, 2)
        sentence = "the server already holds 2 requests, its maximum: retry later"
        assert (await client.post(POLL, poll_of())).error == (503, "PlaneUnavailable", sentence)
        await plane.submit("q", b"x", id="a")
        await wait_until(lambda: first.complete or second.complete, description="an answer")
        answer = await client.post(AWAIT, {"invocation_id": "a", "timeout_s": 0.01})
        assert answer.fields == {"state": "pending"}
        first.leave()
        second.leave()


async def test_no_request_is_held_longer_than_the_limit(plane: dls.Dispatch) -> None:
    app = create_app(plane, limits=Limits(held=0.05))
    await plane.submit("other", b"x", id="a")
    async with client_of(app) as client:
        assert await client.do(POLL, poll_of(timeout_s=1e9)) == {"commands": []}
        assert await client.do(AWAIT, {"invocation_id": "a"}) == {"state": "pending"}
        fields = {"items": [{"invocation_id": "a"}], "timeout_s": 1e9}
        assert await client.do(AWAIT_MANY, fields) == {"results": [], "pages": []}
        assert await client.do(HEARTBEAT, {"worker_id": "w", "wait_s": 1e9}) == {"lost": [], "cancel": []}


# --- the server's end -------------------------------------------------------------------------------------------------


async def test_when_the_server_ends_what_is_held_answers_and_streams_end(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    await plane.submit("other", b"x", id="a")
    requests = [
        Asked(app, POLL, poll_of()),
        Asked(app, POLL, poll_of(poll_id="p")),
        Asked(app, AWAIT, {"invocation_id": "a", "timeout_s": PATIENCE}),
        Asked(app, AWAIT_MANY, {"items": [{"invocation_id": "a"}], "timeout_s": PATIENCE}),
        Asked(app, HEARTBEAT, {"worker_id": "w", "wait_s": PATIENCE}),
        Asked(app, "/v1/producer/invocations/a/result/stream"),
    ]
    async with asking(*requests):
        await held(app, len(requests))
        app.drain()
    answers = [await request.answer() for request in requests]
    assert [answer.status for answer in answers] == [200] * 6
    assert [answer.fields for answer in answers[:5]] == [
        {"commands": []},
        {"commands": []},
        {"state": "pending"},
        {"results": [], "pages": []},
        {"lost": [], "cancel": []},
    ]
    assert answers[5].body == b""
    # and what comes now is answered without a wait
    assert await ask(app, POLL, poll_of()) == {"commands": []}
    assert await ask(app, AWAIT, {"invocation_id": "a"}) == {"state": "pending"}


async def test_a_claim_under_way_at_the_servers_end_is_answered(gated: Gated) -> None:
    app = create_app(gated)
    await gated.submit("q", b"x", id="a")
    request = Asked(app, POLL, poll_of())
    async with asking(request):
        await gated.claimed.wait()
        app.drain()
        gated.gate.set()
    assert ids_of(await request.fields()) == [("a", 1)]


async def test_a_heartbeat_at_the_servers_end_renews_all_the_same(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    await plane.submit("q", b"x", id="a")
    await ask(app, POLL, poll_of(lease_s=1.0))
    app.drain()
    fields = {"worker_id": "w", "claims": [["a", 1]], "lease_s": 1000.0, "wait_s": PATIENCE}
    assert await ask(app, HEARTBEAT, fields) == {"lost": [], "cancel": []}
    (row,) = await plane.rows(RowFilter(id="a"))
    assert row.lease_until is not None
    assert row.started_at is not None
    assert row.lease_until - row.started_at > 500


async def test_the_lifespan_ends_what_is_held_and_closes_the_planes_of_other_namespaces(
    tmp_path: Path, monkeypatch: Any
) -> None:
    closed: list[str] = []
    aclose = dls.Dispatch.aclose

    async def noted(plane: dls.Dispatch) -> None:
        closed.append(plane.ns)
        await aclose(plane)

    monkeypatch.setattr(dls.Dispatch, "aclose", noted)
    async with dls.Dispatch(tmp_path / "plane.db") as plane:
        app = create_app(plane)
        request = Asked(app, "/v1/namespaces/ns2/daemon/poll", poll_of())
        async with app.router.lifespan_context(app), asking(request):
            await held(app, 1)
            async with client_of(app) as client:
                await client.do("/v1/namespaces/ns3/daemon/poll", poll_of(timeout_s=0))
            app.drain()
        assert await request.fields() == {"commands": []}
        assert sorted(closed) == ["ns2", "ns3"]
    assert sorted(closed) == ["default", "ns2", "ns3"]


# --- tokens that are revoked meanwhile -------------------------------------------------------------------------------


@pytest.mark.parametrize("poll_id", [None, "p"])
async def test_a_held_poll_whose_token_is_revoked_is_refused_and_its_claim_goes_back(
    plane: dls.Dispatch, keys: Keys, poll_id: str | None
) -> None:
    app = create_app(plane, tokens=keys.file)
    request = Asked(app, POLL, poll_of(poll_id=poll_id), authorization=keys["old"])
    async with asking(request):
        await held(app, 1)
        keys.revoke("old")
        await plane.submit("q", b"x", id="a")
    assert (await request.answer()).error == UNKNOWN
    assert await state_of(plane, "a") == ("queued", 1, 0, 0)
    again = Asked(app, POLL, poll_of(poll_id=poll_id), authorization=keys["new"])
    async with asking(again):
        pass
    assert ids_of(await again.fields()) == [("a", 2)]


async def test_a_repeat_with_another_token_has_the_claim_of_a_poll_whose_token_was_revoked(
    gated: Gated, keys: Keys
) -> None:
    app = create_app(gated, tokens=keys.file)
    await gated.submit("q", b"x", id="a")
    older = Asked(app, POLL, poll_of(poll_id="p"), authorization=keys["old"])
    repeat = Asked(app, POLL, poll_of(poll_id="p"), authorization=keys["new"])
    async with asking(older):
        await gated.claimed.wait()
        keys.revoke("old")
        async with asking(repeat):
            await held(app, 2)
            gated.gate.set()
    assert ids_of(await repeat.fields()) == [("a", 1)]


async def test_a_held_poll_whose_token_is_still_there_has_its_job(plane: dls.Dispatch, keys: Keys) -> None:
    app = create_app(plane, tokens=keys.file)
    request = Asked(app, POLL, poll_of(), authorization=keys["old"])
    async with asking(request):
        await held(app, 1)
        keys.revoke("new")
        await plane.submit("q", b"x", id="a")
    assert ids_of(await request.fields()) == [("a", 1)]


@pytest.mark.parametrize("route", ["await", "await-many", "heartbeat"])
async def test_whatever_else_is_held_is_refused_when_its_token_is_revoked(
    plane: dls.Dispatch, keys: Keys, route: str
) -> None:
    app = create_app(plane, tokens=keys.file)
    await _submit_and_claim(plane, "a")
    requests = {
        "await": (AWAIT, {"invocation_id": "a"}, "producer"),
        "await-many": (AWAIT_MANY, {"items": [{"invocation_id": "a"}]}, "producer"),
        "heartbeat": (HEARTBEAT, {"worker_id": "w", "claims": [["a", 1]], "lease_s": 60.0, "wait_s": 30.0}, "old"),
    }
    path, fields, name = requests[route]
    request = Asked(app, path, fields, authorization=keys[name])
    async with asking(request):
        await held(app, 1)
        keys.revoke(name)
        if route == "heartbeat":
            await plane.cancel("a")
        else:
            await plane.finish(Fence("a", "w", 1), "succeeded", result=b"secret")
    answer = await request.answer()
    assert answer.error == UNKNOWN
    assert b"secret" not in answer.body


async def test_a_stream_whose_token_is_revoked_is_broken_off_before_the_next_frame(
    plane: dls.Dispatch, keys: Keys, caplog: Any
) -> None:
    app = create_app(plane, tokens=keys.file)
    await _submit_and_claim(plane, "a")
    await plane.append(Fence("a", "w", 1), 0, [b"before"])
    request = Asked(app, "/v1/producer/invocations/a/result/stream", authorization=keys["producer"])
    async with asking(request):
        await held(app, 1)
        keys.revoke("producer")
        await plane.append(Fence("a", "w", 1), 1, [b"after"])
    assert b"".join(request.chunks) == b"before"
    assert not request.complete
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().endswith("/result/stream failed: NotAuthorized")


# --- behind a socket --------------------------------------------------------------------------------------------------


async def test_R92_after_200_polls_that_were_cut_off_nothing_is_held_and_every_job_is_there(tmp_path: Path) -> None:
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        polls = server.app.endpoint.service.polls
        async with server.client() as client:
            for number in range(200):
                poll_id = {"poll_id": f"p{number}"} if number % 2 else {}
                connection = await server.ask(POLL, poll_of(**poll_id))
                if number % 3:
                    await wait_until(lambda: len(polls) > 0, description="the poll")
                await connection.aclose()
            await wait_until(lambda: len(polls) == 0, description="the end of all of them")
            await quiet(lambda: len(polls), 0.3, description="none that comes late")
            await client.do("/v1/producer/submit", {"invocation_id": "a", "queue": "q", "args_blob": b"x"})
            assert ids_of(await client.do(POLL, poll_of())) == [("a", 1)]


async def test_a_connection_that_ends_as_the_job_comes_loses_no_job(tmp_path: Path) -> None:
    """The end of the connection lies in the server's socket already, unread, when the job is claimed for it."""
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        polls = server.app.endpoint.service.polls

        async def close_and_submit(connection: Any, id: str) -> None:
            # On the server's own loop, so that it cannot have read the end before.
            connection.extra(anyio.abc.SocketAttribute.raw_socket).shutdown(socket.SHUT_RDWR)
            await server.plane.submit("q", b"x", id=id)

        async with server.client() as client:
            for number in range(50):
                async with await server.ask(POLL, poll_of()) as connection:
                    await wait_until(lambda: len(polls) == 1, description="the poll")
                    server.call(close_and_submit, connection, f"a{number}")
                    await wait_until(lambda: len(polls) == 0, description="its end")
                found = ids_of(await client.do(POLL, poll_of()))
                assert [id for id, _ in found] == [f"a{number}"]


async def test_a_stream_follows_and_is_freed_when_its_reader_leaves(tmp_path: Path) -> None:
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        polls, plane = server.app.endpoint.service.polls, server.plane
        server.call(_submit_and_claim, plane, "a")
        async with await server.connect("GET /v1/producer/invocations/a/result/stream") as connection:
            head = await _read_until(connection, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"\r\ncontent-type: application/x-msgpack-stream\r\n" in head
            for seq in range(3):
                server.call(plane.append, Fence("a", "w", 1), seq, [b"frame %d" % seq])
                assert await _read_until(connection, b"frame %d\r\n" % seq) == b"7\r\nframe %d\r\n" % seq
            assert len(polls) == 1
        await wait_until(lambda: len(polls) == 0, description="the stream's end")


async def _read_until(connection: Any, end: bytes) -> bytes:
    found = b""
    with anyio.fail_after(PATIENCE):
        while not found.endswith(end):
            found += await connection.receive()
    return found


async def _submit_and_claim(plane: Any, id: str) -> None:
    await plane.submit("q", b"x", id=id)
    assert len(await plane.claim(["q"], "w", lease=60.0)) == 1


async def test_streams_and_polls_end_with_the_server_and_their_bodies_are_whole(tmp_path: Path) -> None:
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        server.call(_submit_and_claim, server.plane, "a")
        server.call(server.plane.append, Fence("a", "w", 1), 0, [b"frame"])
        async with await server.connect("GET /v1/producer/invocations/a/result/stream") as connection:
            await _read_until(connection, b"frame\r\n")
            server.call(server.drain)
            assert await _read_until(connection, b"0\r\n\r\n") == b"0\r\n\r\n"


async def test_a_stream_that_fails_in_the_middle_is_broken_off(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """A reader must not take it for the end."""
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        server.call(_submit_and_claim, server.plane, "a")
        path = "/v1/producer/invocations/a/result/stream"

        async def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the disk is gone")

        async with await server.connect(f"GET {path}") as connection:
            await _read_until(connection, b"\r\n\r\n")
            monkeypatch.setattr(server.plane, "_read_new_page", fail)
            server.call(server.plane.append, Fence("a", "w", 1), 0, [b"frame"])
            with pytest.raises(anyio.EndOfStream):
                await _read_until(connection, b"0\r\n\r\n")
    (record,) = [record for record in caplog.records if record.name == "dreamlake.lakeshore.server"]
    assert record.getMessage().endswith("to /v1/producer/invocations/:id/result/stream failed: RuntimeError")
    assert record.exc_info is not None


async def test_a_reader_that_does_not_read_holds_one_page_and_nobody_up(tmp_path: Path) -> None:
    with served(lambda: dls.Dispatch(tmp_path / "plane.db"), limits=Limits(page=100_000)) as server:
        server.call(_submit_and_claim, server.plane, "a")
        frame = random.Random(1).randbytes(50_000)
        async with await server.connect("GET /v1/producer/invocations/a/result/stream"):
            for seq in range(400):
                server.call(server.plane.append, Fence("a", "w", 1), seq, [frame])
            server.call(_fail, server.plane)
            async with server.client() as client:
                answer = await client.get("/v1/producer/invocations/a/result/stream", {"since": 389})
                assert answer.body == 10 * frame


async def _fail(plane: Any) -> None:
    await plane.finish(Fence("a", "w", 1), "failed", error=Failure("E", "x"))
