"""Execute one invocation, in a worker or in a child process: Envelope bytes in, a `BodyOutcome` out; the values that a
generator yields go to a `ValueSink` meanwhile.

Whatever goes wrong, from bytes that are no Envelope to a body that calls `sys.exit`, becomes the outcome. Only cancellation
is raised: the caller knows whether it was meant for this body, or is the body's own doing.

Exceptions are the body's objects, and may lie about their class, their members and their text. They are examined with the
methods of the builtin classes only.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
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

_THIS_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MAX_TEXT_LENGTH = 64 * 1024
"""Characters of an error's message, and of its traceback."""
_members = BaseExceptionGroup.__dict__["exceptions"].__get__
_class_name = type.__dict__["__name__"].__get__


@dataclass(frozen=True, slots=True)
class BodyOutcome:
    """How a body ended."""

    state: str
    """succeeded, failed, killed or timeout; an executor may add states that only its worker knows."""
    result: bytes | None = None
    """The packed value of a body that succeeded."""
    error: Failure | None = None
    final: bool = False
    """No retry can help."""


class Backpressure(Enum):
    """What a body must do after it has yielded a value: nothing, let the event loop run once, or wait for room."""

    NONE = "none"
    CHECKPOINT = "checkpoint"
    WAIT = "wait"


class ValueSink(Protocol):
    """Takes the values of a generator body, and holds what its worker must know about the body."""

    function: str
    """`execute` sets it: the qualified name of the function, for people."""
    in_thread: bool
    """`execute` sets it when the body runs in a thread, which cannot be stopped from outside."""

    def begin(self) -> None:
        """Called once before a generator body starts."""
        ...

    def add(self, value: Any, /) -> Backpressure:
        """Take a value, from any thread, and never block. Raises when the body is to stop."""
        ...

    def room(self) -> Coroutine[Any, Any, None]:
        """Let the event loop run once, and wait while there is no room. Raises when the body is to stop."""
        ...


@dataclass(frozen=True)
class BodySettings:
    """Where bodies run, and what may run there."""

    root: Path
    """The folder of all keys, absolute."""
    allow_pickled: bool
    """Whether functions may be unpickled."""
    runtime_policy: str = "minor"
    """See `functions.runtime.check_runtime`."""
    registry: Mapping[str, Callable[..., Any]] | None = None
    """Maps qualified names to functions. It is asked before anything is imported."""
    allow_modules: tuple[str, ...] = ()
    """Modules that references may name besides the user's own."""


@dataclass(frozen=True, slots=True)
class _Body:
    context: BodyContext
    fn: Callable[..., Any]
    kind: BodyKind
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__qualname__", "?"))

    def run(self) -> Any:
        return run_body(self.context, self.fn, self.kind, self.args, self.kwargs)


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
    """Execute an invocation on this event loop; `def` bodies and generators run in a thread.

    Cancellation: an async body is cancelled. A thread cannot be: it runs on until it ends, and its outcome is dropped.

    Args:
        body: The bytes of the Envelope.
        settings: Where the body runs, and what may run there.
        sink: Where its values go.
        id: The invocation's id.
        attempt: Counts from 1.
        threads: Limits the threads.
        prefix: The prefix of its keys, when the Envelope has none.
        payload: Words to add to the error when the bytes are no Envelope.
    """
    try:
        envelope = _read(body, id, payload)
        if isinstance(envelope, BodyOutcome):
            return envelope
        sink.function = envelope.fn.get("qualname") or "?"
        prepare = partial(_prepare, envelope, settings, id, attempt, prefix)
        if envelope.fn.get("kind") == "ref" and settings.registry is None and _loaded(envelope.fn.get("module")):
            ready = prepare()
        else:  # an import or an unpickling may take long
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
    except Exception as exc:  # of this package: it must not end the worker, which has other invocations to run
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
    """Execute an invocation in a process that does nothing else: bodies run in this thread.

    An exception that is raised in this thread from outside, as a signal handler does, counts as the body's.

    Args:
        body: The bytes of the Envelope.
        settings: Where the body runs, and what may run there.
        sink: Where its values go.
        id: The invocation's id; None: that of the Envelope.
        attempt: Counts from 1.
        prefix: The prefix of its keys, when the Envelope has none.
        loop: Runs a coroutine function on a new event loop.
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
    except Exception as exc:  # of this package
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
    """Whether a module is imported completely: the event loop would wait for an import that runs in another thread."""
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
        context = invocation_context(settings.root, envelope.prefix or prefix, id, attempt)
        return _Body(context, fn, body_kind(fn), args, kwargs)
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
    """Run a generator in a thread: values go directly to the sink, and the thread calls the loop only to wait for room."""
    manifest = Manifest()
    try:
        items = body.run()
        try:
            for item in items:
                manifest.add(item)
                if _add_value(body, sink, item) is Backpressure.WAIT:
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
                if _add_value(body, sink, item) is not Backpressure.NONE:
                    await sink.room()
        finally:
            await items.aclose()
        return _succeeded(body, manifest.value())
    except BaseException as exc:
        _raise_cancellation(exc)
        return failed(exc)


def _add_value(body: _Body, sink: ValueSink, item: Any) -> Backpressure:
    try:
        return sink.add(item)
    except EncodeError as exc:
        raise EncodeError(f"a value that {body.name!r} yielded cannot be packed: {exc}") from None


def _raise_cancellation(exc: BaseException) -> None:
    """Raise `exc` on when it is a cancellation and nothing else; task groups may have wrapped it."""
    kind = anyio.get_cancelled_exc_class()
    found = list(leaf_exceptions(exc))
    if all(issubclass(type(leaf), kind) for leaf in found):
        raise found[0]


def leaf_exceptions(exc: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside an exception group, at any depth, each once; of another exception, itself."""
    pending = [exc]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if id(found) in seen:  # the paths through groups that share members can be too many to walk
            continue
        seen.add(id(found))
        if issubclass(type(found), BaseExceptionGroup):
            pending.extend(reversed(_members(found)))
        else:
            yield found


def _succeeded(body: _Body, value: Any) -> BodyOutcome:
    try:
        return BodyOutcome("succeeded", pack(value))
    except EncodeError as exc:
        return failed_permanently(EncodeError(f"the result of {body.name!r} cannot be packed: {exc}"))


def failed(exc: BaseException) -> BodyOutcome:
    """The outcome of a body that raised."""
    final = issubclass(type(exc), EncodeError)  # another attempt would raise the same
    return BodyOutcome("failed", None, describe_exception(exc), final)


def failed_permanently(exc: BaseException) -> BodyOutcome:
    """The outcome of an invocation that must not be retried: another attempt would fail in the same way."""
    return BodyOutcome("failed", None, describe_exception(exc), True)


def describe_exception(exc: BaseException) -> Failure:
    """Describe an exception as text that can always be sent: its class, its message, and the traceback with its causes."""
    try:
        name = _clean(_class_name(type(exc)))
        try:
            message = _clean(str(exc))
        except BaseException as broken:
            message = f"<the text of this {name} could not be made: {_class_name(type(broken))}>"
        try:
            formatted = traceback.TracebackException(type(exc), exc, _traceback_of_body(exc), compact=True).format()
            shown = _clean("".join(formatted))
        except BaseException as broken:
            shown = f"<the traceback could not be made: {_class_name(type(broken))}>"
        return Failure(name, message, shown)
    except BaseException:  # no memory, or no stack, is left for more
        return Failure("Error", "<nothing could be said about what was raised>")


def _traceback_of_body(exc: BaseException) -> Any:
    """The traceback from the body's first frame on, without frames of this package; all of it when none would be left."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_THIS_FOLDER):
        tb = tb.tb_next
    return tb or exc.__traceback__


def _clean(text: str) -> str:
    text = str.__str__(text)  # a plain copy of a subclass, whose methods are not ours
    if len(text) > _MAX_TEXT_LENGTH:
        half = _MAX_TEXT_LENGTH // 2
        text = f"{text[:half]}\n... {len(text) - _MAX_TEXT_LENGTH} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
