"""One invocation, wherever it runs: envelope bytes in, what came of it out, yielded values through `sink` on the way.

Whatever goes wrong inside, from bytes that are no envelope to a body that calls `sys.exit`, is what came of it. Only
cancellation is raised: whether it was meant for this body, or is the body's own doing, its caller knows.

Exceptions are the body's objects, and may lie about their class, their members and their text: they are looked at from
outside only, by the methods of the builtin classes.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
import anyio.from_thread
import anyio.to_thread

from ..errors import EncodeError, WireError
from ..functions.resolve import resolve_fn
from ..functions.serialize import is_udf
from ..planes.contract.records import Failure
from ..wire import Envelope, pack
from .call import BodyKind, body_kind, run_body
from .context import BodyContext, invocation_context
from .keys import Manifest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

    from anyio import CapacityLimiter

__all__ = [
    "Backpressure",
    "BodyOutcome",
    "BodySettings",
    "ValueSink",
    "describe_exception",
    "execute",
    "execute_blocking",
    "failed",
    "failed_permanently",
    "leaf_exceptions",
]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TEXT_LIMIT = 64 * 1024
_members = BaseExceptionGroup.__dict__["exceptions"].__get__
_class_name = type.__dict__["__name__"].__get__


class BodyOutcome(NamedTuple):
    """What came of a body. `final`: no retry can help."""

    state: str
    result: bytes | None = None
    error: Failure | None = None
    final: bool = False


class Backpressure(Enum):
    """What a body has to do after it gave a value: go on, let the event loop run once, or wait for room."""

    NONE = "none"
    CHECKPOINT = "checkpoint"
    WAIT = "wait"


class ValueSink(Protocol):
    """Where the values of a generator body go, and what passes between the body's runner and who asked for it."""

    function: str
    """Set here: the qualified name of the function, for people."""
    in_thread: bool
    """Set here when the body runs in a thread, which cannot be stopped from outside."""

    def begin(self) -> None:
        """Called once before a generator body starts."""
        ...

    def add(self, value: Any) -> Backpressure:
        """Take a value, from any thread, and never block. Raises when the body is to stop."""
        ...

    async def room(self) -> None:
        """Let the event loop run once, and wait while there is no room. Raises when the body is to stop."""
        ...


@dataclass(frozen=True)
class BodySettings:
    """Where bodies run, and what may run there.

    root: the absolute folder of the keys. allow_pickled: whether functions may be unpickled. runtime_policy: see
    `functions.resolve.check_runtime`. registry: qualified name -> function, asked before anything is imported.
    allow_modules: modules that refs may name besides the user's own.
    """

    root: Path
    allow_pickled: bool
    runtime_policy: str = "minor"
    registry: Mapping[str, Callable[..., Any]] | None = None
    allow_modules: tuple[str, ...] = ()


class _Body(NamedTuple):
    call: BodyContext
    fn: Callable[..., Any]
    kind: BodyKind
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__qualname__", "?"))

    def run(self) -> Any:
        return run_body(self.call, self.fn, self.kind, self.args, self.kwargs)


async def execute(
    body: bytes,
    settings: BodySettings,
    sink: ValueSink,
    *,
    id: str,
    attempt: int,
    threads: CapacityLimiter,
    prefix: str = "",
    payload: str = "",
) -> BodyOutcome:
    """Run the invocation `id` from its envelope; `def` and generator bodies in a thread under the limiter `threads`.

    prefix: used when the envelope has none. payload: a word more for bytes that are no envelope.

    Cancellation: an `async` body is cancelled; a thread is left to itself, and goes on until it ends.
    """
    try:
        envelope = _read(body, id, payload)
        if isinstance(envelope, BodyOutcome):
            return envelope
        sink.function = envelope.fn.get("qualname") or "?"
        prepare = partial(_prepare, envelope, settings, id, attempt, prefix)
        if envelope.fn.get("kind") == "ref" and settings.registry is None and _loaded(envelope.fn.get("module")):
            ready = prepare()
        else:  # an import or an unpickling may take its time
            ready = await anyio.to_thread.run_sync(prepare, abandon_on_cancel=True, limiter=threads)
        if isinstance(ready, BodyOutcome):
            return ready
        if ready.kind in ("gen", "asyncgen"):
            sink.begin()
        if ready.kind == "async":
            return await _run_async(ready)
        if ready.kind == "asyncgen":
            return await _run_asyncgen(ready, sink)
        sink.in_thread = True
        run = partial(_run_gen, ready, sink) if ready.kind == "gen" else partial(_run_def, ready)
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=threads)
    except Exception as exc:  # of ours: it must not end the worker, which has other invocations to run
        return failed_permanently(exc)


def execute_blocking(
    body: bytes,
    settings: BodySettings,
    sink: ValueSink,
    *,
    id: str | None,
    attempt: int,
    prefix: str,
    loop: Callable[[Callable[[], Awaitable[BodyOutcome]]], BodyOutcome],
) -> BodyOutcome:
    """The same in a process that has nothing else to do: bodies run in this thread, async ones by `loop`.

    id: None for the Envelope's own. An exception for this thread, such as a signal handler raises, is the body's.
    """
    try:
        envelope = _read(body, id or "?", "")
        if isinstance(envelope, BodyOutcome):
            return envelope
        sink.function = envelope.fn.get("qualname") or "?"
        ready = _prepare(envelope, settings, id or envelope.id, attempt, prefix)
        if isinstance(ready, BodyOutcome):
            return ready
        if ready.kind in ("gen", "asyncgen"):
            sink.begin()
        if ready.kind == "def":
            return _run_def(ready)
        if ready.kind == "gen":
            return _run_gen(ready, sink)
        return loop(partial(_run_async, ready) if ready.kind == "async" else partial(_run_asyncgen, ready, sink))
    except Exception as exc:  # of ours
        return failed_permanently(exc)


def _read(body: bytes, id: str, payload: str) -> Envelope | BodyOutcome:
    try:
        envelope = Envelope.from_bytes(body)
        for name in ("kind", "module", "qualname"):
            value = envelope.fn.get(name)
            if value is not None and not isinstance(value, str):
                raise WireError(f"`fn.{name}` should be text, but is of type {type(value).__name__}")
        return envelope
    except WireError as exc:
        return failed_permanently(
            WireError(f"the payload of invocation {id!r} is not one that a worker can run: {exc}{payload}")
        )
    except BaseException as exc:  # codecs are the user's, and may raise anything
        return failed_permanently(exc)


def _loaded(module: object) -> bool:
    """Whether a module is there, and not only begun by an import in another thread, for which the loop would wait."""
    found = sys.modules.get(module) if isinstance(module, str) else None
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)


def _prepare(envelope: Envelope, settings: BodySettings, id: str, attempt: int, prefix: str) -> _Body | BodyOutcome:
    try:
        target = resolve_fn(
            envelope.fn,
            registry=settings.registry,
            allow_pickled=settings.allow_pickled,
            runtime_policy=settings.runtime_policy,
            allow_modules=settings.allow_modules,
            cfg=envelope.cfg,
        )
        fn = target.__wrapped__ if is_udf(target) else target
        args, kwargs = envelope.arguments()
        call = invocation_context(settings.root, envelope.prefix or prefix, id, attempt)
        return _Body(call, fn, body_kind(fn), args, kwargs)
    except BaseException as exc:  # codecs and modules are the user's, and may raise anything
        return failed_permanently(exc)


def _run_def(body: _Body) -> BodyOutcome:
    try:
        return _succeeded(body, body.run())
    except BaseException as exc:
        return failed(exc)


async def _run_async(body: _Body) -> BodyOutcome:
    try:
        return _succeeded(body, await body.run())
    except BaseException as exc:
        _raise_cancellation(exc)
        return failed(exc)


def _run_gen(body: _Body, sink: ValueSink) -> BodyOutcome:
    """In a thread: values go straight into the writer; the thread crosses to the loop only to wait for room."""
    manifest = Manifest()
    try:
        items = body.run()
        try:
            for item in items:
                manifest.add(item)
                if _give(body, sink, item) is Backpressure.WAIT:
                    anyio.from_thread.run(sink.room)
        finally:
            items.close()
        return _succeeded(body, manifest.value())
    except BaseException as exc:
        return failed(exc)


async def _run_asyncgen(body: _Body, sink: ValueSink) -> BodyOutcome:
    manifest = Manifest()
    try:
        items = body.run()
        try:
            async for item in items:
                manifest.add(item)
                if _give(body, sink, item) is not Backpressure.NONE:
                    await sink.room()
        finally:
            await items.aclose()
        return _succeeded(body, manifest.value())
    except BaseException as exc:
        _raise_cancellation(exc)
        return failed(exc)


def _give(body: _Body, sink: ValueSink, item: Any) -> Backpressure:
    try:
        return sink.add(item)
    except EncodeError as exc:
        raise EncodeError(f"a value that {body.name!r} yielded cannot be packed: {exc}") from None


def _raise_cancellation(exc: BaseException) -> None:
    """A cancellation, and nothing else, is for the caller to judge; task groups may have wrapped it."""
    kind = anyio.get_cancelled_exc_class()
    inside = list(leaf_exceptions(exc))
    if all(issubclass(type(leaf), kind) for leaf in inside):
        raise inside[0]


def leaf_exceptions(exc: BaseException) -> Iterator[BaseException]:
    """The exceptions in the groups that task groups wrap around them, each once; of a plain exception, itself."""
    waiting, seen = [exc], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:  # groups that share members have more paths than anybody could walk
            continue
        seen.add(id(one))
        if issubclass(type(one), BaseExceptionGroup):
            waiting.extend(reversed(_members(one)))
        else:
            yield one


def _succeeded(body: _Body, value: Any) -> BodyOutcome:
    try:
        return BodyOutcome("succeeded", pack(value))
    except EncodeError as exc:
        return failed_permanently(EncodeError(f"the result of {body.name!r} cannot be packed: {exc}"))


def failed(exc: BaseException) -> BodyOutcome:
    """The outcome of a body that raised."""
    final = issubclass(type(exc), EncodeError)  # another attempt would meet the same
    return BodyOutcome("failed", None, describe_exception(exc), final)


def failed_permanently(exc: BaseException) -> BodyOutcome:
    """The outcome of an invocation that no further attempt could help."""
    return BodyOutcome("failed", None, describe_exception(exc), True)


def describe_exception(exc: BaseException) -> Failure:
    """An exception as text that always can be sent: its class, its words, and the traceback with notes and causes."""
    try:
        name = _clean(_class_name(type(exc)))
        try:
            message = _clean(str(exc))
        except BaseException as broken:
            message = f"<the text of this {name} could not be made: {_class_name(type(broken))}>"
        try:
            shown = _clean("".join(traceback.TracebackException(type(exc), exc, _own(exc), compact=True).format()))
        except BaseException as broken:
            shown = f"<the traceback could not be made: {_class_name(type(broken))}>"
        return Failure(name, message, shown)
    except BaseException:  # no memory, or no stack, is left for more
        return Failure("Error", "<nothing could be said about what was raised>")


def _own(exc: BaseException) -> Any:
    """The traceback from the body's first frame on, without the package's own; all of it when that leaves nothing."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_HERE):
        tb = tb.tb_next
    return tb or exc.__traceback__


def _clean(text: str) -> str:
    text = str.__str__(text)  # a plain copy of a subclass, whose methods are not ours
    if len(text) > _TEXT_LIMIT:
        half = _TEXT_LIMIT // 2
        text = f"{text[:half]}\n... {len(text) - _TEXT_LIMIT} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
