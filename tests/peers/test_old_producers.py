"""What old producers submit is run by our workers and by their own, through our server and through a stranger's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers import wait_until_sync
from peer_bodies import VALUES, arrays

if TYPE_CHECKING:
    from pathlib import Path

    from peer_kit import Peer


def test_values_arrive_and_come_back_as_they_were(peer: Peer, queue: str) -> None:
    equal, kinds = peer.run(
        """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        got = q.call(dls.thunk(bodies.echo, *bodies.VALUES, named=bodies.VALUES))
        say(bodies.same(got, (tuple(bodies.VALUES), {"named": bodies.VALUES})))
        say(q.call(dls.thunk(bodies.kinds, *bodies.VALUES)))
        """,
        queue,
    )
    assert equal
    assert kinds == [type(value).__name__ for value in VALUES]


def test_arrays_arrive_and_come_back_as_they_were(peer: Peer, queue: str) -> None:
    equal, doubled, kinds = peer.run(
        """
        q, arrays = dls.SyncQueue(argv[0], dispatch=plane), bodies.arrays()
        got = q.call(dls.thunk(bodies.echo, *arrays))
        say(bodies.same(got, (tuple(arrays), {})))
        say(q.call(dls.thunk(bodies.doubled, arrays[0])).tolist())
        say(q.call(dls.thunk(bodies.kinds, *arrays)))
        """,
        queue,
    )
    assert equal
    assert doubled == [[0, 2, 4], [6, 8, 10]]
    assert kinds == ["ndarray"] * len(arrays())


def test_a_failure_is_raised_with_its_text(peer: Peer, queue: str) -> None:
    (raised,) = peer.run(
        """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        say(raised(q.call, dls.thunk(bodies.fail, "ValueError", "boom")))
        """,
        queue,
    )
    assert raised[0] == "DispatchError"
    assert raised[1].endswith("boom")


def test_values_are_streamed_and_read_again_from_any_place(peer: Peer, queue: str) -> None:
    live, again, rest, result, tuples = peer.run(
        """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        id = q.submit(dls.thunk(bodies.count, 5))
        say(list(q.stream(id)))
        say(list(q.stream(id)))
        say(list(q.stream(id, since=2)))
        say(q.result(id))
        say([type(value).__name__ for value in q.stream(q.submit(dls.thunk(bodies.count_async, 3)))])
        """,
        queue,
    )
    assert (live, again, rest, result) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 4], None)
    assert tuples == ["tuple"] * 3


def test_a_value_is_there_before_the_next_one_is_made(peer: Peer, queue: str, tmp_path: Path) -> None:
    script = """
        q, opened = dls.SyncQueue(argv[0], dispatch=plane), argv[1]
        for value in q.stream(q.submit(dls.thunk(bodies.one_then_wait, opened))):
            say(value)
            open(opened, "w").close()
    """
    assert peer.run(script, queue, str(tmp_path / "opened")) == ["first", "second"]


def test_a_stream_ends_with_the_error_of_its_body(peer: Peer, queue: str) -> None:
    values, raised = peer.run(
        """
        q, got = dls.SyncQueue(argv[0], dispatch=plane), []
        id = q.submit(dls.thunk(bodies.count_and_fail, 3))
        error = raised(lambda: [got.append(value) for value in q.stream(id)])
        say(got)
        say(error)
        """,
        queue,
    )
    assert values == [0, 1, 2]
    assert raised[0] == "DispatchError"
    assert raised[1].endswith("ValueError: boom")


def test_the_keys_that_a_generator_yields_are_its_result(peer: Peer, queue: str) -> None:
    assert peer.run("say(dls.SyncQueue(argv[0], dispatch=plane).call(dls.thunk(bodies.keys)))", queue) == [["a", "b"]]


def test_a_body_sees_the_scope_of_its_caller(peer: Peer, queue: str) -> None:
    script = """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        with dls.scope("scenes/0007"):
            id = q.submit(dls.thunk(bodies.prefix))
        say(q.result(id))
    """
    assert peer.run(script, queue) == ["scenes/0007"]


def test_of_two_submits_with_one_key_one_is_run(peer: Peer, queue: str, tmp_path: Path) -> None:
    first, second, other, results = peer.run(
        """
        q, file = dls.SyncQueue(argv[0], dispatch=plane), argv[1]
        ids = [q.submit(dls.thunk(bodies.note, file, line), key=key) for line, key in zip("abc", ("k", "k", "other"))]
        for id in ids:
            say(id)
        say([q.result(id) for id in ids])
        """,
        queue,
        str(tmp_path / "lines"),
    )
    assert first == second != other
    assert results == ["a", "a", "c"]
    assert (tmp_path / "lines").read_text() == "a\nc\n"


def test_the_highest_priority_goes_first_and_of_equals_the_oldest(peer: Peer, queue: str, tmp_path: Path) -> None:
    started, opened, lines = (str(tmp_path / name) for name in ("started", "opened", "lines"))
    peer.run("dls.SyncQueue(argv[0], dispatch=plane).submit(dls.thunk(bodies.gate, *argv[1:]))", queue, started, opened)
    wait_until_sync(lambda: (tmp_path / "started").exists(), 60, "the body that keeps the worker busy")
    (ids,) = peer.run(
        """
        q, file = dls.SyncQueue(argv[0], dispatch=plane), argv[1]
        order = [("low", -1.0), ("first", 0.0), ("second", 0.9), ("high", 2.9), ("higher", 3.0)]
        say([q.submit(dls.thunk(bodies.note, file, line), priority=priority) for line, priority in order])
        """,
        queue,
        lines,
    )
    (tmp_path / "opened").touch()
    peer.run("[dls.SyncQueue(argv[0], dispatch=plane).result(id) for id in argv[1]]", queue, ids)
    assert (tmp_path / "lines").read_text().split() == ["higher", "high", "first", "second", "low"]


def test_get_shows_how_an_invocation_stands(peer: Peer, queue: str) -> None:
    before, after, failed = peer.run(
        """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        say(plane.get(dls.SyncQueue("nobody works here", dispatch=plane).submit(dls.thunk(bodies.keys)))["state"])
        id = q.submit(dls.thunk(bodies.echo))
        q.result(id)
        say(plane.get(id)["state"])
        id = q.submit(dls.thunk(bodies.fail, "KeyError", "k"))
        raised(q.result, id)
        say([plane.get(id)["state"], str(plane.get(id)["error"])])
        """,
        queue,
    )
    assert (before, after, failed[0]) == ("queued", "succeeded", "failed")
    assert "'k'" in failed[1]


def test_a_worker_refuses_a_pickled_function_and_says_how_to_allow_it(peer: Peer, queue: str) -> None:
    (raised,) = peer.run("say(raised(dls.SyncQueue(argv[0], dispatch=plane).call, dls.thunk(lambda: 1)))", queue)
    assert "pickled" in raised[1]
    assert "--allow-pickled" in raised[1]


def test_unknown_invocations_are_a_404_at_once(peer: Peer) -> None:
    result, get, stream, seconds = peer.run(
        """
        import time
        q, id, began = dls.SyncQueue("q", dispatch=plane), "01HX0000000000000000000000", time.monotonic()
        say(raised(q.result, id))
        say(raised(plane.get, id))
        say(raised(lambda: list(q.stream(id))))
        say(time.monotonic() - began)
        """
    )
    for raised in (result, get, stream):
        assert raised[0] == "DispatchError"
        assert "-> 404" in raised[1]
        assert "InvocationNotFound" in raised[1]
    assert seconds < 15.0  # an await is held for 60
