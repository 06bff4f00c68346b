"""Envelopes and exceptions made to break the code that inspects them: each fails alone and once, and the worker goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import pytest
import worker_bodies as bodies
from anyio.lowlevel import checkpoint
from helpers import each_row, needs

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.body.execute import BodyOutcome, describe_exception, leaf_exceptions
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.wire import Envelope, pack
from dreamlake.lakeshore.worker.loop import Worker
from dreamlake.lakeshore.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from dreamlake.lakeshore.body.execute import ValueSink
    from dreamlake.lakeshore.planes.contract.operations import Claimed

pytestmark = pytest.mark.anyio


async def failed_once(queue: dls.Queue, id: str) -> Failure:
    """Return the error of an invocation that failed at once, and check that the same worker runs another one."""
    with anyio.fail_after(20):
        assert await queue.call(dls.thunk(bodies.double, 21)) == 42
        with pytest.raises(dls.InvocationFailed) as caught:
            await queue.result(id)
    row = await queue.get(id)
    assert (row.state, row.attempt, row.lost) == ("failed", 1, 0)
    return Failure(caught.value.type, caught.value.message, caught.value.traceback)


# --- envelopes ------------------------------------------------------------------------------------------------------


def deep() -> Any:
    """Return the deepest allowed payload: to print it needs more stack than there is."""
    made: Any = []
    for _ in range(1000):
        made = [made]
    return made


def tuples() -> Any:
    """Deeper still: a tuple is a payload of its own."""
    made: Any = 1
    for _ in range(14):
        for _ in range(500):
            made = [made]
        made = (made,)
    return made


def array() -> Any:
    """It compares to an array, which is neither true nor false."""
    return needs("numpy").array([1, 2])


ODD = each_row("odd", [array, deep, tuples, dict, bytes, float])


@ODD
@each_row("name", ["kind", "module", "qualname", "blob"])
async def test_an_envelope_whose_function_is_not_named_by_text_fails_alone(
    queue: dls.Queue, name: str, odd: Callable[[], Any]
) -> None:
    fn = {"kind": "ref", "module": "worker_bodies", "qualname": "double", "src_hash": None}
    if name == "blob":
        fn = {"kind": "pickle", "qualname": "double", "hash": "sha256:00", "runtime": {}}
    body = Envelope(id="x", fn={**fn, name: odd()}, args=pack([1])).to_bytes()
    async with running_worker(queue, retries=3):
        id = await submit(queue, body)
        error = await failed_once(queue, id)
        if name != "blob":
            assert (error.type, f"`fn.{name}` should be text, but is of type " in error.message) == ("WireError", True)


@ODD
@each_row("name", ["v", "id", "fn", "args", "kwargs", "prefix", "cfg"])
async def test_an_envelope_with_a_field_of_another_type_fails_alone(
    queue: dls.Queue, name: str, odd: Callable[[], Any]
) -> None:
    fields: dict[str, Any] = {"v": 1, "id": "x", "fn": {"kind": "ref", "module": "no_such_module", "qualname": "f"}}
    async with running_worker(queue, retries=3):
        await failed_once(queue, await submit(queue, pack({**fields, name: odd()})))


async def submit(queue: dls.Queue, body: bytes) -> str:
    return str(await queue.dispatch.do(Submit(new_id(), queue.name, body)))


# --- exceptions -----------------------------------------------------------------------------------------------------


class NoMembers(BaseExceptionGroup[BaseException]):
    @property
    def exceptions(self) -> Any:
        return ()


class Text(str):
    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("not encoded")

    def __len__(self) -> NoReturn:
        raise ValueError("not measured")

    def __getitem__(self, key: Any) -> NoReturn:
        raise ValueError("not cut")

    def __format__(self, spec: str) -> NoReturn:
        raise ValueError("not formatted")


class OddText(Exception):
    def __str__(self) -> str:
        return Text("odd text")


class RaisingName(type):
    @property
    def __name__(cls) -> Any:
        raise ZeroDivisionError("no name")


class HalfName(type):
    @property
    def __name__(cls) -> Any:
        return "\ud800"


class Nameless(Exception, metaclass=RaisingName): ...


class HalfNamed(Exception, metaclass=HalfName): ...


class NamelessText(Exception, metaclass=RaisingName):
    def __str__(self) -> NoReturn:
        raise Nameless


class Denies(Exception):
    @property
    def __class__(self) -> Any:
        raise ZeroDivisionError("no class")


class DeniesAll(BaseException):
    def __getattribute__(self, name: str) -> NoReturn:
        raise ZeroDivisionError(name)


def nested(depth: int = 3000) -> Exception:
    made: Exception = ValueError("innermost")
    for _ in range(depth):
        made = ExceptionGroup("a group", [made])
    return made


HOSTILE: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "nested": (nested, "ExceptionGroup", "a group (1 sub-exception)"),
    "no members": (lambda: NoMembers("none", [KeyError(1)]), "NoMembers", "none (1 sub-exception)"),
    "odd text": (OddText, "OddText", "odd text"),
    "nameless": (Nameless, "Nameless", ""),
    "half named": (HalfNamed, "HalfNamed", ""),
    "nameless text": (NamelessText, "NamelessText", "<the text of this NamelessText could not be made: Nameless>"),
    "denies": (Denies, "Denies", ""),
    "denies all": (DeniesAll, "DeniesAll", ""),
}


def fail(kind: str) -> NoReturn:
    raise HOSTILE[kind][0]()


async def afail(kind: str) -> NoReturn:
    await checkpoint()
    raise HOSTILE[kind][0]()


def fail_after_one(kind: str) -> Iterator[int]:
    yield 1
    raise HOSTILE[kind][0]()


async def afail_after_one(kind: str) -> AsyncIterator[int]:
    yield 1
    raise HOSTILE[kind][0]()


@each_row("kind", HOSTILE)
@each_row("body", [fail, afail, fail_after_one, afail_after_one])
async def test_an_exception_that_resists_being_looked_at_fails_its_invocation_alone(
    queue: dls.Queue, body: Any, kind: str
) -> None:
    async with running_worker(queue):
        error = await failed_once(queue, await queue.submit(dls.thunk(body, kind)))
    assert (error.type, error.message) == HOSTILE[kind][1:]
    assert error.traceback


def test_what_is_said_of_an_exception_is_plain_text() -> None:
    for make, name, _ in HOSTILE.values():
        said = describe_exception(make())
        assert said.type == name
        assert {type(text) for text in said[:3]} == {str}
        pack(said.as_dict())


def test_groups_that_share_their_members_have_each_leaf_once_and_in_order() -> None:
    one, two = ValueError(1), KeyError(2)
    made = ExceptionGroup("a", [one, two])
    for _ in range(60):  # too many paths to follow each of them
        made = ExceptionGroup("both", [made, made])
    assert list(leaf_exceptions(made)) == [one, two]
    assert list(leaf_exceptions(one)) == [one]


# --- the worker's own ------------------------------------------------------------------------------------------------


class Faulty:
    """An executor that raises, or that returns outcomes which cannot be encoded."""

    paused_until = 0.0

    def __init__(self, faults: list[BaseException | BodyOutcome]) -> None:
        self._faults = faults

    async def run(self, claimed: Claimed, emit: ValueSink) -> BodyOutcome:
        await checkpoint()
        if not self._faults:
            return BodyOutcome("succeeded", pack("went on"))
        fault = self._faults.pop(0)
        if isinstance(fault, BaseException):
            raise fault
        return fault


@each_row(
    "fault, type, message",
    [
        (lambda: ZeroDivisionError("a fault"), "ZeroDivisionError", "a fault"),
        (Denies, "Denies", ""),
        (lambda: RecursionError("too deep"), "RecursionError", "too deep"),
        (
            lambda: BodyOutcome("failed", None, Failure("Half\ud800", "words"), True),
            "DispatchError",
            "the outcome of the body cannot be encoded",
        ),
        (
            lambda: BodyOutcome("failed", None, Failure("Error", "half a pair \ud800"), True),
            "DispatchError",
            "the outcome of the body cannot be encoded",
        ),
    ],
)
async def test_a_fault_around_a_body_fails_its_invocation_alone(
    queue: dls.Queue, fault: Callable[[], BaseException | BodyOutcome], type: str, message: str
) -> None:
    settings = WorkerSettings(concurrency=1, retries=3, timeout=None, lease=30.0, max_lost=5, grace=5.0)
    worker = Worker(queue.dispatch, [queue.name], Faulty([fault()]), settings)
    stop = anyio.Event()
    async with anyio.create_task_group() as group:

        async def work() -> None:
            assert await worker.run(once=False, stop=stop) == 2

        group.start_soon(work)
        with anyio.fail_after(20):
            id = await queue.submit("first")
            with pytest.raises(dls.InvocationFailed) as caught:
                await queue.result(id)
            assert await queue.result(await queue.submit("second")) == "went on"
        stop.set()
    assert (caught.value.type, caught.value.message) == (type, message)
    assert (await queue.get(id)).attempt == 1
