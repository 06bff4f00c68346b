"""What the client does with its requests: few of them, patient ones, none to strangers, and nothing left at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import re
import socket
import threading
import time
import traceback
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack
import pytest
from helpers import quiet, run_python, wait_until
from http_kit import (
    Processes,
    Seen,
    Server,
    requests_of,
    scripted,
    served,
    served_fresh,
    server_process,
    unused_port,
)
from proxy import proxy_before

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency import backoff
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claim, Fence, Finish, Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.http import long_polls
from dreamlake.lakeshore.planes.http.store import HttpStore
from dreamlake.lakeshore.planes.outage import Outage
from dreamlake.lakeshore.planes.protocol.errors import TooLarge
from dreamlake.lakeshore.server.limits import Limits
from dreamlake.lakeshore.server.tokens import create_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio

MSGPACK = {"content-type": "application/x-msgpack"}


@pytest.fixture
async def remote(server: Server) -> AsyncIterator[dls.HttpDispatch]:
    async with dls.HttpDispatch(server.url) as plane:
        yield plane


@pytest.fixture
def queue() -> str:
    """A queue of which nobody else knows."""
    return f"queue-{new_id()}"


async def gathered(calls: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """What they give at the same time: values, or exceptions."""
    results: list[Any] = [None] * len(calls)

    async def one(at: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            results[at] = await call()
        except Exception as exc:
            results[at] = exc

    async with anyio.create_task_group() as group:
        for at, call in enumerate(calls):
            group.start_soon(one, at, call)
    return results


async def finish_all(plane: dls.Dispatch, queue: str, count: int, each: int) -> None:
    """Claim and end `count` invocations, `each` at a time; the result is the id."""
    for _ in range(0, count, each):
        claims = await plane.claim([queue], "w", limit=each, timeout=10)
        ops = [Finish(Fence(one.id, "w", one.attempt), "succeeded", one.id.encode()) for one in claims]
        assert await plane.many(ops) == [True] * len(ops)
        await anyio.sleep(0.01)


def polls_of(plane: dls.HttpDispatch) -> list[set[Any]]:
    """What stands in each poll for waits."""
    found = [
        one for one in gc.get_objects() if type(one) is long_polls.LongPolls and one._send.__self__._plane is plane
    ]  # type: ignore[attr-defined]
    return [keys for one in found for keys in one._keys.values()]


def covered(plane: dls.HttpDispatch) -> set[Any]:
    return set().union(*polls_of(plane))


# Few requests --------------------------------------------------------------------------------------------------------


async def test_concurrent_operations_share_requests() -> None:
    async with served_fresh() as plane:
        ids = await gathered([partial(plane.submit, "q", b"x", id=f"i{n}") for n in range(1000)])
        assert ids == [f"i{n}" for n in range(1000)]
        assert requests_of(plane) <= 5
        claims = await plane.do(Claim(("q",), "w", limit=1000))
        before = requests_of(plane)
        fences = [Fence(one.id, "w", one.attempt) for one in claims]
        assert await gathered([partial(plane.append, fence, 0, [b"f"]) for fence in fences]) == [(1, 0)] * 1000
        assert await gathered([partial(plane.finish, fence, "succeeded") for fence in fences]) == [True] * 1000
        assert requests_of(plane) - before <= 10


async def test_a_thousand_waits_are_a_few_requests() -> None:
    inner = dls.Dispatch(":memory:")
    async with served(inner) as plane:
        ids = [str(id) for id in await inner.many([Submit(f"i{n}", "q", b"x") for n in range(1000)])]
        before = requests_of(plane)
        async with anyio.create_task_group() as group:
            group.start_soon(finish_all, inner, "q", 1000, 20)
            outcomes = await gathered([partial(plane.outcome, id) for id in ids])
        assert [outcome.result for outcome in outcomes] == [id.encode() for id in ids]
        assert requests_of(plane) - before <= 60


async def test_a_wait_that_comes_later_cuts_off_no_poll(server: Server, queue: str, anyio_backend_name: str) -> None:
    """A poll that is cut off costs its connection, and the server a line that says so."""
    before = len(server.err)
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(proxy.url) as plane, dls.HttpDispatch(server.url) as other:
            ids = [await other.submit(queue, b"x") for _ in range(80)]
            async with anyio.create_task_group() as group:
                for id in ids:
                    group.start_soon(plane.outcome, id)
                    await anyio.sleep(0.005)
                connections = proxy.connections
                claims = await other.claim([queue], "w", limit=80)
                await other.many([Finish(Fence(one.id, "w", one.attempt), "succeeded") for one in claims])
            said = [line for line in server.err[before:].splitlines() if "await-many" in line]
    assert len(claims) == 80
    assert connections <= 12
    assert said
    assert not [line for line in said if "await-many 499" in line]


async def test_the_last_of_many_waits_is_served_at_once(remote: dls.HttpDispatch, server: Server, queue: str) -> None:
    """Those before it wait on, in polls that are held: a newer poll makes the server answer the older one."""
    ids = [await remote.submit("nobody-works-" + queue, b"x") for _ in range(12)]
    id = await remote.submit(queue, b"x")
    async with dls.HttpDispatch(server.url) as other, anyio.create_task_group() as group:
        (claimed,) = await other.claim([queue], "w")
        for waited in ids:
            group.start_soon(remote.outcome, waited)
            group.start_soon(partial(remote.next_page, waited, -1))
            await anyio.sleep(0.02)
        began = time.monotonic()
        async with anyio.create_task_group() as last:
            last.start_soon(remote.outcome, id)
            await anyio.sleep(0.1)
            await other.finish(Fence(id, "w", claimed.attempt), "succeeded")
        assert time.monotonic() - began < 15  # those polls are held for 22 at least
        group.cancel_scope.cancel()


async def test_more_waits_than_a_poll_may_hold_stand_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_polls, "MAX_ITEMS_PER_REQUEST", 100)
    monkeypatch.setattr(long_polls, "MIN_RECENT_WAITS", 8)
    async with served_fresh() as plane:
        ids = await plane.many([Submit(new_id(), "q", b"x") for _ in range(450)])
        ended: list[str] = []

        async def wait(id: str) -> None:
            assert (await plane.outcome(id, timeout=60)).result == id.encode()
            ended.append(id)

        async with anyio.create_task_group() as group:
            for id in ids[:430]:
                group.start_soon(wait, id)
            await wait_until(lambda: len(covered(plane)) == 430, description="polls for all of them")
            for id in ids[430:]:  # one by one, when most polls are full
                group.start_soon(wait, id)
                await wait_until(lambda: ids[430:].index(id) + 431 == len(covered(plane)), description="a poll for it")  # noqa: B023
            assert max(map(len, polls_of(plane))) <= 100
            assert 5 <= len([keys for keys in polls_of(plane) if keys]) <= 7
            claims = {one.id: one for one in await plane.claim(["q"], "w", limit=450)}
            random.shuffle(ids)
            for start in range(0, 450, 15):
                some = [Finish(Fence(id, "w", claims[id].attempt), "succeeded", id.encode()) for id in ids[start:][:15]]
                assert await plane.many(some) == [True] * 15
                await wait_until(lambda: len(ended) == start + 15, description="the ends of these")  # noqa: B023
        assert requests_of(plane) < 600


async def test_streams_and_results_share_one_poll() -> None:
    inner = dls.Dispatch(":memory:")
    async with served(inner) as plane:
        ids = [await inner.submit("q", b"x") for _ in range(50)]
        claims = await inner.claim(["q"], "w", limit=50)
        before = requests_of(plane)

        async def finish() -> None:
            await anyio.sleep(0.3)
            for one in claims:
                await inner.append(Fence(one.id, "w", one.attempt), 0, [b"frame of " + one.id.encode()])
            await inner.many([Finish(Fence(one.id, "w", one.attempt), "succeeded") for one in claims])

        async with anyio.create_task_group() as group:
            group.start_soon(finish)
            pages = await gathered([partial(plane.next_page, id, -1) for id in ids])
            outcomes = await gathered([partial(plane.outcome, id) for id in ids])
        assert [page.frames for page in pages] == [[(0, b"frame of " + id.encode())] for id in ids]
        assert {outcome.state for outcome in outcomes} == {"succeeded"}
        assert requests_of(plane) - before <= 60


async def test_an_idle_waiter_and_an_idle_claimer_ask_seldom(remote: dls.HttpDispatch, queue: str) -> None:
    id = await remote.submit("nobody-works-" + queue, b"x")
    async with anyio.create_task_group() as group:
        group.start_soon(remote.outcome, id)
        group.start_soon(partial(remote.claim, [queue], "w", timeout=None))
        await wait_until(lambda: requests_of(remote) >= 3, description="the submit, the wait and the poll")
        await quiet(lambda: requests_of(remote), 1.5, description="no request")
        group.cancel_scope.cancel()


# Out of reach --------------------------------------------------------------------------------------------------------


async def test_a_server_that_never_answered_is_missing_after_the_patience() -> None:
    with unused_port() as port:
        url = f"http://127.0.0.1:{port}"
        await _missing(url)


async def _missing(url: str) -> None:
    assert dls.HttpDispatch(url).patience == 30.0
    sentence = rf"no answer to POST /producer/\S+ at {url}, request [0-9A-Z]{{26}}: no connection: "
    async with dls.HttpDispatch(url) as plane:
        plane.patience = 0.3
        began = time.monotonic()
        with pytest.raises(dls.PlaneUnavailable, match=sentence):
            await plane.submit("q", b"x")
        assert time.monotonic() - began >= 0.3
        with pytest.raises(dls.PlaneUnavailable, match=sentence):
            await plane.outcome("some-id")
        with pytest.raises(dls.PlaneUnavailable, match=sentence):
            await plane.next_page("some-id", -1)
        with pytest.raises(dls.PlaneUnavailable, match="no answer to POST /daemon/poll"):
            await plane.claim(["q"], "w", timeout=None)


async def test_a_server_that_answered_once_is_waited_for_longer(remote: dls.HttpDispatch, queue: str) -> None:
    await remote.submit(queue, b"x")
    assert remote.patience == 300.0
    remote.patience = 7.0
    await remote.submit(queue, b"x")
    assert remote.patience == 7.0


@pytest.mark.parametrize("status", [502, 503, 504, 429])
async def test_a_gateway_that_says_later_is_asked_again(status: int) -> None:
    answers = iter([(status, {"content-type": "text/html"}, b"<html>Bad gateway</html>")] * 3)
    good = msgpack.packb({"results": [{"invocation_id": "i1"}]})
    with scripted(lambda seen: next(answers, (200, MSGPACK, good))) as server:
        async with dls.HttpDispatch(server.url) as plane:
            assert await plane.submit("q", b"x", id="i1") == "i1"
        assert [seen.path for seen in server.seen] == ["/v1/producer/submit-many"] * 4
        assert len({seen.body for seen in server.seen}) == 1


@pytest.mark.parametrize(("patience", "seconds"), [(3.0, 5.0), (30.0, 30.0), (300.0, 60.0)])
async def test_an_answer_is_waited_for_as_long_as_the_patience_lets_it(patience: float, seconds: float) -> None:
    """So that commands, which have little of it, give a server that is mute up soon."""
    waited: list[tuple[float, float]] = []

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            held = msgpack.unpackb(await request.aread())["timeout_s"]
            waited.append((held, request.extensions["timeout"]["read"]))
            return httpx.Response(200, headers=MSGPACK, content=msgpack.packb({"commands": []}))

    async with dls.HttpDispatch("http://127.0.0.1", transport=Transport()) as plane:
        plane.patience = patience
        assert await plane.claim(["q"], "w") == []
        assert waited == [(0.0, seconds)]
        async with anyio.create_task_group() as group:
            group.start_soon(partial(plane.claim, ["q"], "w", timeout=20.0))
            await wait_until(lambda: len(waited) >= 2, description="a poll that is held")
            held, read = waited[1]
            assert 0.0 < held <= 20.0
            assert read == pytest.approx(held + 15.0)
            group.cancel_scope.cancel()


async def test_a_mute_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamlake.lakeshore.planes.http.attempt.MIN_ANSWER_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with dls.HttpDispatch(url) as plane:
            plane.patience = 0.2
            with anyio.fail_after(20):
                sentence = (
                    rf"^no answer to POST \S+ at {url}, request \S+: TimeoutError: no byte of an answer within 0.3 s$"
                )
                with pytest.raises(dls.PlaneUnavailable, match=sentence):
                    await plane.submit("q", b"x")


async def test_after_an_outage_one_answer_wakes_all_who_wait_for_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have waited long would wait as long again before they asked anew."""
    monkeypatch.setattr(backoff, "random", SimpleNamespace(uniform=lambda least, most: 1000.0))
    down = True

    def script(seen: Seen) -> tuple[int, dict[str, str], bytes]:
        if down:
            return 503, {}, b""
        answers = {"submit-many": {"results": [{"invocation_id": "i"}]}, "queues": {"queues": []}}
        return 200, MSGPACK, msgpack.packb(answers.get(seen.path.split("/")[-1].partition("?")[0], {"results": []}))

    with scripted(script) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    group.start_soon(partial(plane.submit, "q", b"x", id="i"))
                    group.start_soon(plane.current_outcomes, ["i"])
                    await wait_until(lambda: len(plane._outage._pauses._wake_ups) == 2, description="two that wait")
                    seen = len(server.seen)
                    await anyio.sleep(Outage.WAKE_AFTER)
                    assert len(server.seen) == seen
                    down = False
                    assert await plane.counts() == {}
            assert not plane._outage._pauses._wake_ups


async def test_where_some_requests_fail_and_others_do_not_nobody_is_woken() -> None:
    """Or each answer to one would have all the others ask again."""
    outage = Outage("a plane")
    async with anyio.create_task_group() as group:
        group.start_soon(outage.pause, 60.0)
        for _ in range(5):
            await wait_until(lambda: outage._pauses._wake_ups, description="who waits")
            outage.record_answer()
            outage.record_failure(dls.PlaneUnavailable("of one"), 60.0)
        await anyio.wait_all_tasks_blocked()
        assert len(outage._pauses._wake_ups) == 1
        group.cancel_scope.cancel()
    assert not outage._pauses._wake_ups


# Strangers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_R118_a_redirect_is_not_followed(status: int) -> None:
    with scripted(lambda seen: (200, MSGPACK, msgpack.packb({}))) as elsewhere:
        headers = {"location": f"{elsewhere.url}/v1/producer/submit-many"}
        with scripted(lambda seen: (status, headers, b"")) as server:
            async with dls.HttpDispatch(server.url, token="a-secret-token") as plane:
                with pytest.raises(
                    dls.DispatchError, match=r"was redirected to .* which is not followed: a token goes"
                ):
                    await plane.submit("q", b"x")
                with pytest.raises(dls.DispatchError, match="was redirected"):
                    await plane.page("some-id")
                with pytest.raises(dls.DispatchError, match="was redirected"):
                    with anyio.fail_after(20):
                        await plane.outcome("some-id")
            assert server.seen
        assert elsewhere.seen == []


@pytest.mark.parametrize("status", [200, 404])
async def test_a_page_in_place_of_an_answer_is_said(status: int) -> None:
    page = {"content-type": "text/html; charset=utf-8"}
    with scripted(lambda seen: (status, page, b"<html><title>Welcome</title></html>")) as server:
        async with dls.HttpDispatch(server.url) as plane:
            sentence = (
                rf"^expected a control plane at {server.url}, got an answer of status {status} "
                r"\(text/html; charset=utf-8\) that begins with '<html><title>Welcome</title></html>': "
                rf"no control plane is there, check the URL \((POST|GET) \S+ at {server.url}, request \S+\)"
            )
            for verb in (partial(plane.submit, "q", b"x"), partial(plane.claim, ["q"], "w")):
                with pytest.raises(dls.DispatchError, match=sentence + "$") as caught:
                    await verb()
                assert not isinstance(caught.value, dls.PlaneUnavailable)
            older = "" if status == 200 else "; one of an older kind cannot list invocations"
            for _ in range(2):  # also when it is known already
                with pytest.raises(dls.DispatchError, match=f"{sentence}{older}$"):
                    await plane.rows(RowFilter())


@pytest.mark.parametrize(
    "answer",
    [{"results": []}, {"results": "none"}, {}, {"results": [1]}, {"results": [{"invocation_id": 7}, {}]}],
    ids=repr,
)
async def test_an_answer_of_another_shape_is_an_error_of_the_plane(answer: dict[str, Any]) -> None:
    with scripted(lambda seen: (200, MSGPACK, msgpack.packb(answer))) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="submit_many"):
                await plane.submit("q", b"x")


# Errors --------------------------------------------------------------------------------------------------------------


async def test_an_error_names_its_request_as_the_server_does(remote: dls.HttpDispatch, server: Server) -> None:
    with pytest.raises(ValueError, match="invocation id") as caught:
        await remote.rows(RowFilter(id="../../x"))
    found = re.search(r"GET /producer/invocations at (\S+), request ([0-9A-Z]{26})", str(caught.value))
    assert found is not None, str(caught.value)
    assert found[1] == server.url
    request = "GET /v1/producer/invocations 400 "
    await wait_until(
        lambda: [line for line in server.err.splitlines() if request in line and f"id={found[2]}" in line],
        description="the request in the server's log",
    )


async def test_what_is_too_large_fails_alone() -> None:
    async with served_fresh(limits=Limits(body=20_000)) as plane:
        bodies = [b"x" * 100] * 5 + [b"y" * 30_000] + [b"z" * 8000] * 5
        answers = await gathered([partial(plane.submit, "q", body, id=f"i{n}") for n, body in enumerate(bodies)])
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [5]
        assert isinstance(answers[5], TooLarge)
        assert "expected a body of at most 20000 bytes, got a larger one" in str(answers[5])
        assert len(await plane.rows(RowFilter())) == 10


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


async def test_a_wrong_token_is_refused_at_once(tokens: Path, tmp_path: Path, started: Processes) -> None:
    producer = create_token(tokens, "p", "producer", "default")
    with server_process(tmp_path / "plane.db", tokens=tokens) as server:
        for token in (None, "lks_wrong"):
            async with dls.HttpDispatch(server.url, token=token) as plane:
                with anyio.fail_after(25):  # less than its patience
                    for verb in (
                        partial(plane.submit, "q", b"x"),
                        partial(plane.outcome, "some-id"),
                        partial(plane.next_page, "some-id", -1),
                        partial(plane.claim, ["q"], "w", timeout=None),
                        partial(plane.rows, RowFilter()),
                    ):
                        sentence = (
                            r"^expected a token, .* got (none|one that is not known here) \(.*\): it is given with "
                            r"LAKESHORE_CLIENT_TOKEN, --token-file or token=$"
                        )
                        with pytest.raises(dls.NotAuthorized, match=sentence):
                            await verb()
        async with dls.HttpDispatch(server.url, token=f" {producer}\n") as plane:  # as files and variables have it
            await plane.submit("q", b"x")
            with pytest.raises(dls.NotAuthorized, match=r"expected a token of the role worker, got one of .* producer"):
                await plane.claim(["q"], "w")
        async with dls.HttpDispatch(server.url, token=producer, namespace="other") as plane:
            with pytest.raises(dls.NotAuthorized, match="expected the namespace of the token, 'default', got 'other'"):
                await plane.submit("q", b"x")
        process = started.command("queue", "list", LAKESHORE_URL=server.url, LAKESHORE_CLIENT_TOKEN="lks_wrong")
        assert await anyio.to_thread.run_sync(process.ends) == 4
        assert "expected a token" in process.err
        for token_of in ({"LAKESHORE_CLIENT_TOKEN": f"{producer}\n"}, None):
            held = tmp_path / "token"
            held.write_text(f"{producer}\n")
            held.chmod(0o600)
            options = [] if token_of else ["--token-file", held]
            process = started.command("queue", "list", "--json", *options, LAKESHORE_URL=server.url, **(token_of or {}))
            assert await anyio.to_thread.run_sync(process.ends) == 0, process.err
        process = started.command("worker", "start", LAKESHORE_URL=server.url, LAKESHORE_CLIENT_TOKEN=producer)
        assert await anyio.to_thread.run_sync(process.ends) == 4
        assert "expected a token of the role worker" in process.err
        assert "lks_wrong" not in server.err
        assert producer not in server.err + process.err


async def test_the_token_is_shown_by_nothing(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, anyio_backend_name: str
) -> None:
    secret = create_token(tokens, "w", "worker", "default")
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []

    async def failing(plane: dls.HttpDispatch) -> None:
        plane.patience = 0.1
        shown.extend([repr(plane), str(plane), f"{plane}"])
        for verb in (partial(plane.submit, "q", b"x"), partial(plane.rows, RowFilter(id="../x")), plane.counts):
            try:
                await verb()
            except Exception as exc:
                shown.extend([repr(exc), str(exc), *traceback.format_exception(exc)])
                shown.extend(repr(vars(one)) for one in (exc, exc.__cause__, exc.__context__) if one is not None)

    with server_process(tmp_path / "plane.db", tokens=tokens) as server:
        async with dls.HttpDispatch(server.url, token=secret) as plane:
            await failing(plane)
        async with dls.HttpDispatch(server.url, token=secret, namespace="other") as plane:
            await failing(plane)
        shown.append(server.err)
    with unused_port() as port:
        async with dls.HttpDispatch(f"http://127.0.0.1:{port}", token=secret) as plane:
            await failing(plane)
    with scripted(lambda seen: (302, {"location": "http://127.0.0.1:1/"}, b"")) as stranger:
        async with dls.HttpDispatch(stranger.url, token=secret) as plane:
            await failing(plane)
        assert {seen.headers["authorization"] for seen in stranger.seen} == {f"Bearer {secret}"}
    assert len(shown) > 30
    for text in [*shown, *caplog.messages, caplog.text]:
        assert secret not in text
        assert secret.removeprefix("lks_") not in text


SECRET = "give a token with token=, LAKESHORE_CLIENT_TOKEN or --token-file"
NO_HOST = "after http:// or https:// comes the name of a host, in ASCII without spaces"
SCHEME = "it begins with http:// or https://"
PORT = "a port is a number from 1 to 65535, an IPv6 address stands in brackets"


@pytest.mark.parametrize(
    ("url", "shown", "hint"),
    [
        ("", "", SCHEME),
        ("localhost:8750", "localhost:8750", f"{SCHEME}: write http://localhost:8750"),
        ("10.0.0.1/below", "10.0.0.1/below", f"{SCHEME}: write http://10.0.0.1/below"),
        ("host", "host", f"{SCHEME}: write http://host"),
        ("ftp://host", "ftp://host", SCHEME),
        ("http://", "http://", NO_HOST),
        ("http://a host", "http://a host", NO_HOST),
        ("http://host:port", "http://host:port", PORT),
        ("http://[::1", "http://[::1", PORT),
        ("http://user:pass@host:1", "http://host", SECRET),
        ("user:pass@host:1", "host:1", SECRET),
        ("http://host/?token=x", "http://host", SECRET),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, shown: str, hint: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        dls.HttpDispatch(url)
    without = ", without a user or a query in it" if hint == SECRET else ""
    expected = f"expected the URL of a control plane, such as http://127.0.0.1:8750{without}, got {shown!r}: {hint}"
    assert str(caught.value) == expected


def test_a_token_that_is_none_is_refused_and_not_shown() -> None:
    for token in ("", "  \n", "two words", "t\u00f6ken"):
        with pytest.raises(
            ValueError, match=r"^expected a token, printable ASCII without spaces, got [0-9]+ char"
        ) as caught:
            dls.HttpDispatch("http://127.0.0.1:1", token=token)
        assert not token.strip() or token not in str(caught.value)


# Leaving -------------------------------------------------------------------------------------------------------------


def sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            pass
    return count


def portal_tasks() -> set[Any]:
    async def tasks() -> set[Any]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    return portal().call(tasks)


async def test_what_is_under_way_when_the_plane_is_closed_does_not_open_it_again() -> None:
    with scripted(lambda seen: (503, {}, b"")) as server:
        plane = dls.HttpDispatch(server.url)
        verbs = [
            partial(plane.submit, "q", b"x"),
            partial(plane.current_outcomes, ["i"]),
            partial(plane.outcome, "i"),
            plane.counts,
        ]
        async with anyio.create_task_group() as group:

            async def closing() -> None:
                await wait_until(lambda: len(server.seen) >= 4, description="the verbs")
                await plane.aclose()

            group.start_soon(closing)
            with anyio.fail_after(20):
                told = await gathered(verbs)
        assert [type(one) for one in told] == [dls.PlaneUnavailable] * 4
        assert plane._engines.opened() is None
        await quiet(lambda: len(server.seen), 0.3, description="no request")
        assert plane._engines.opened() is None


async def test_an_opening_that_nobody_waits_for_any_more_is_undone() -> None:
    said: list[str] = []

    class Store(HttpStore):
        home = "portal"

        async def open(self) -> None:
            await super().open()
            said.append("opened")
            with anyio.CancelScope(shield=True):  # done, whoever leaves meanwhile
                await anyio.sleep(0.2)

        async def close(self) -> None:
            await super().close()
            said.append("closed")

    plane = dls.HttpDispatch("http://127.0.0.1:1")
    plane._make_store = lambda: Store(plane)
    async with anyio.create_task_group() as group:
        group.start_soon(plane.submit, "q", b"x")
        await wait_until(lambda: said, description="the opening")
        group.cancel_scope.cancel()
    assert said == ["opened", "closed"]
    assert plane._engines.opened() is None


async def test_closing_leaves_nothing(server: Server, queue: str) -> None:
    """Whatever other tasks wait for at that moment: they are told."""
    tasks = portal_tasks()  # whose loop has sockets too
    before = sockets(), tasks, set(threading.enumerate())
    plane = dls.HttpDispatch(server.url)
    id = await plane.submit("nobody-works-" + queue, b"x")
    claimed_id = await plane.submit(queue, b"x")
    (claimed,) = await plane.claim([queue], "w")
    assert claimed.id == claimed_id
    told: list[Exception] = []

    async def wait(verb: Callable[[], Awaitable[Any]]) -> None:
        try:
            await verb()
        except Exception as exc:
            told.append(exc)

    verbs: list[Callable[[], Awaitable[Any]]] = [
        partial(plane.outcome, id),
        partial(plane.outcome, id, timeout=60),
        partial(plane.next_page, id, -1),
        partial(plane.claim, [queue], "w", timeout=None),
        partial(plane.claim, [queue], "w", timeout=60),
        partial(plane.next_cancels, "w", 60),
    ]
    async with anyio.create_task_group() as group:
        for verb in verbs:
            group.start_soon(wait, verb)
        await anyio.sleep(0.3)
        with anyio.fail_after(20):
            await plane.aclose()
    assert len(told) == len(verbs)
    assert {type(exc) for exc in told} == {dls.PlaneUnavailable}
    assert all("closed" in str(exc) for exc in told), told

    def left() -> tuple[int, set[Any], set[Any]]:
        return sockets() - before[0], portal_tasks() - before[1], set(threading.enumerate()) - before[2]

    await wait_until(lambda: left()[0] <= 0, description="the end of the sockets")
    await wait_until(lambda: left()[1:] == (set(), set()), description="the end of tasks and threads")
    async with plane:  # and it may be used again
        assert (await plane.current_outcomes([id]))[0].state == "pending"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_without_a_context_manager_the_loop_s_end_closes_it(server: Server, queue: str, backend: str) -> None:
    """Also while others wait; nothing is said on stderr, where warnings are errors."""
    out, err = run_python(
        """
        import sys, anyio
        import dreamlake.lakeshore as dls

        async def main():
            plane = dls.HttpDispatch(sys.argv[1])
            queue = dls.Queue(sys.argv[2], dispatch=plane)
            id = await queue.submit({"some": "value"})
            async with anyio.create_task_group() as group:
                group.start_soon(queue.result, id)
                group.start_soon(lambda: plane.claim(["nobody-submits-here"], "w", timeout=None))
                await anyio.sleep(0.3)
                group.cancel_scope.cancel()
            (row,) = await queue.list()
            print(row.state)

        anyio.run(main, backend=sys.argv[3])
        """,
        server.url,
        queue,
        backend,
    )
    assert out == "queued\n"
    assert err == ""


async def test_two_event_loops_share_one_plane(server: Server, queue: str) -> None:
    plane = dls.HttpDispatch(server.url)
    mine, ours = dls.Queue(queue, dispatch=plane), dls.SyncQueue(queue, dispatch=plane)

    async def elsewhere() -> list[str]:
        ids = await gathered([partial(mine.submit, n) for n in range(50)])
        return [outcome.state for outcome in await plane.current_outcomes(ids)]

    async with plane:
        async with anyio.create_task_group() as group:
            for run in (
                lambda: anyio.run(elsewhere, backend="asyncio"),
                lambda: anyio.run(elsewhere, backend="trio"),
                lambda: [ours.submit(n) for n in range(10)],
            ):
                group.start_soon(anyio.to_thread.run_sync, run)
            assert await elsewhere() == ["pending"] * 50
        assert await mine.count("queued") == 160
        (id,) = [row.id for row in await mine.list(limit=1)]
        claims = await plane.claim([queue], "w", limit=200)

        async def finish() -> None:
            await anyio.sleep(0.2)
            await plane.many([Finish(Fence(one.id, "w", one.attempt), "succeeded") for one in claims])

        async with anyio.create_task_group() as group:
            group.start_soon(finish)
            group.start_soon(anyio.to_thread.run_sync, partial(ours.result, id, timeout=30))
            assert await mine.result(id, timeout=30) is None


async def test_R92_two_hundred_cancelled_polls_leave_client_and_server_usable(server: Server, queue: str) -> None:
    choose = random.Random(92)
    with proxy_before(server.port) as proxy:
        proxy.delay(0.002)  # so that some leave while they connect
        async with dls.HttpDispatch(proxy.url) as plane:
            id = await plane.submit("nobody-works-" + queue, b"x")
            verbs: list[Callable[[], Awaitable[Any]]] = [
                partial(plane.claim, [queue], "w", timeout=None),
                partial(plane.outcome, id),
                partial(plane.next_page, id, -1),
                partial(plane.next_cancels, "w", 30),
                partial(plane.current_outcomes, [id]),
            ]

            async def leave(verb: Callable[[], Awaitable[Any]], seconds: float) -> None:
                with anyio.move_on_after(seconds):
                    await verb()

            for _ in range(4):
                async with anyio.create_task_group() as group:
                    for _ in range(50):
                        group.start_soon(leave, choose.choice(verbs), choose.random() * 0.1)
            began = time.monotonic()
            waiting = await plane.submit(queue, b"x")
            (claimed,) = await plane.claim([queue], "w", timeout=20)
            assert (claimed.id, claimed.failures, claimed.lost) == (waiting, 0, 0)
            async with anyio.create_task_group() as group:
                group.start_soon(plane.finish, Fence(claimed.id, "w", claimed.attempt), "succeeded")
                assert (await plane.outcome(waiting, timeout=20)).state == "succeeded"
            assert time.monotonic() - began < 15
            assert proxy.connections < 250
        async with dls.HttpDispatch(server.url) as other:
            assert await other.counts(queue) == {(queue, "succeeded"): 1}
            assert await other.counts("nobody-works-" + queue) == {("nobody-works-" + queue, "queued"): 1}


@pytest.mark.parametrize("held", [True, False])
async def test_a_claim_whose_caller_leaves_goes_back_at_once(server: Server, queue: str, held: bool) -> None:
    """Also when the server has already handed something out, and its answer is still under way."""
    async with dls.HttpDispatch(server.url) as other:
        with proxy_before(server.port) as proxy:
            async with dls.HttpDispatch(proxy.url) as plane:
                await plane.current_outcomes(["some-id"])
                proxy.keep_back("/daemon/poll")
                if not held:
                    id = await other.submit(queue, b"x")
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(partial(plane.claim, [queue], "w", timeout=None if held else 0.0))
                        await wait_until(lambda: any("/poll" in one for one in proxy.requests), description="the poll")
                        if held:
                            await anyio.sleep(0.2)
                            id = await other.submit(queue, b"x")
                        await wait_until(lambda: is_running(other, id), description="the claim at the server")
                        scope.cancel()
                began = time.monotonic()
                if not held:  # whose answer is waited for, though its caller has left
                    proxy.hand_out()
                (claimed,) = await other.claim([queue], "v", timeout=30)
                assert time.monotonic() - began < 15  # its lease is longer than that
                assert claimed.id == id
                proxy.hand_out()
                (row,) = await other.rows(RowFilter(id=id))
                assert (row.worker, row.lost, row.failures) == ("v", 0, 0)


async def test_a_claim_whose_answer_was_lost_goes_back_when_its_caller_leaves(server: Server, queue: str) -> None:
    """He leaves before he has asked again: only the server knows what he holds."""
    async with dls.HttpDispatch(server.url) as other:
        with proxy_before(server.port) as proxy:
            async with dls.HttpDispatch(proxy.url) as plane:
                proxy.cut_answers("/daemon/poll", times=1000)  # also those to whom it asks again before it leaves
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(partial(plane.claim, [queue], "w", timeout=None))
                        await anyio.sleep(0.2)
                        id = await other.submit(queue, b"x")
                        await wait_until(lambda: proxy.answers_cut, description="the loss of the answer")
                        scope.cancel()
                began = time.monotonic()
                (claimed,) = await other.claim([queue], "v", timeout=30)
                assert time.monotonic() - began < 15  # its lease is longer than that
                assert (claimed.id, claimed.lost, claimed.failures) == (id, 0, 0)


async def is_running(plane: dls.HttpDispatch, id: str) -> bool:
    return (await plane.rows(RowFilter(id=id)))[0].state == "running"


async def test_a_poll_that_is_left_ends_at_the_server(server: Server, queue: str) -> None:
    """What is submitted then is for others, and nobody has to give it back."""
    async with dls.HttpDispatch(server.url) as plane, dls.HttpDispatch(server.url) as other:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(plane.claim, [queue], "w", timeout=None))
            await wait_until(lambda: requests_of(plane), description="the poll")
            await anyio.sleep(0.3)
            group.cancel_scope.cancel()
        engine = plane._engines.opened()
        assert engine is not None
        await engine.settled()  # the server has been told
        id = await other.submit(queue, b"x")
        (claimed,) = await other.claim([queue], "v", timeout=20)
        assert (claimed.id, claimed.attempt) == (id, 1)
