"""The context of the running code: `dls.scope`, `dls.run`, and the `BodyContext` of a running body.

One context variable holds one immutable record. Tasks and anyio's worker threads inherit it; a thread that a function
starts itself inherits it through `contextvars.copy_context().run`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

from ..errors import KeyContractError
from .keys import Ledger, ReturnedKeys, join_prefix, normalise_key, resolve

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Generator, Mapping

__all__ = [
    "BodyContext",
    "ContextRecord",
    "Run",
    "current_context",
    "current_invocation",
    "invocation_context",
    "local_context",
    "run",
    "scope",
]

T = TypeVar("T")
K = TypeVar("K")


class ContextRecord(NamedTuple):  # a tuple: one is made for every call and scope
    """What `dls.run` reads."""

    root: Path | None = None
    """The folder of all keys; None: the current folder, looked up at each use."""
    prefix: str = ""
    """What keys are read below."""
    invocation_id: str | None = None
    attempt: int | None = None
    ledger: Ledger | None = None
    """The keys that the call wrote; None outside any call."""
    around: ContextRecord | None = None
    """The record of the scope around this one, within the same call."""


_current: ContextVar[ContextRecord] = ContextVar("dreamlake.lakeshore.body.context", default=ContextRecord())  # noqa: B039 -- immutable


def _restore(mine: ContextRecord, outer: ContextRecord) -> ContextRecord | None:
    """Put `outer` in force again in place of `mine`, or of a scope that was entered inside it; return what was in force.

    None when something else is in force. Then an abandoned generator or coroutine is being closed in the middle of other
    code, perhaps by the garbage collector, and nothing changes. Tokens of the context variable cannot tell the two apart:
    a generator may exit a scope in another context than the one it entered it in, or be collected in the same one.
    """
    in_force = _current.get()
    record = in_force
    while record is not mine:
        if record.around is None:
            return None
        record = record.around
    _current.set(outer)
    return in_force


def current_context() -> ContextRecord:
    """The record that is in force here."""
    return _current.get()


def current_invocation() -> str | None:
    """The id of the invocation whose body is running here, or None."""
    return _current.get().invocation_id


@contextmanager
def scope(sub: str = "", *, root: str | os.PathLike[str] | None = None) -> Generator[Run]:
    """Within the block, read keys below a longer prefix, and below another root.

    Scopes nest. The end of the block restores what was in force before, also after an exception.

    Args:
        sub: A key, itself read below the prefix around the block.
        root: The folder of all keys; None: as around the block. A relative one is taken from the current folder at once.

    Returns:
        A context manager that gives `dls.run`.

    Raises:
        KeyContractError: `sub` is not a key, or climbs out of the root.
    """
    outer = _current.get()
    base = outer.root if root is None else Path(root).absolute()
    mine = outer._replace(root=base, prefix=join_prefix(outer.prefix, sub), around=outer)
    _current.set(mine)
    try:
        yield run
    finally:
        _restore(mine, outer)


class Run:
    """The context of the running code: where its keys lead, and as which invocation it runs.

    Outside any scope and invocation the prefix is '' and the root is the current folder.
    """

    __slots__ = ()

    @property
    def root(self) -> Path:
        """The folder below which all keys lie."""
        return _current.get().root or Path.cwd()

    @property
    def prefix(self) -> str:
        """The prefix of all keys, seen from the root; '' is the root itself."""
        return _current.get().prefix

    @property
    def invocation_id(self) -> str | None:
        """The id of the running invocation; None outside one, so in a local call."""
        return current_invocation()

    @property
    def attempt(self) -> int | None:
        """Which attempt of the invocation this is, from 1; None outside an invocation."""
        return _current.get().attempt

    def read(self, key: str) -> Path:
        """Return the path of an existing key.

        Raises:
            KeyContractError: Nothing exists under `key`, it is not a key, or it leads out of the root.
        """
        path = resolve(self.root, self.prefix, key)
        if not path.exists():
            raise KeyContractError(
                f"nothing is there under key {key!r} (prefix {self.prefix!r}, root {str(self.root)!r}): "
                "write it first, or check the key, the dls.scope around the call and the root"
            )
        return path

    def write(self, key: str, dir: bool = False) -> Path:
        """Return the path to write a key to, and make the folders above it. The function must return the key.

        Args:
            key: The key.
            dir: The key is a folder, which is made too.

        Raises:
            KeyContractError: `key` is not a key, or leads out of the root.
            OSError: A folder cannot be made.
        """
        here = _current.get()
        path = resolve(self.root, here.prefix, key)
        folder = path if dir else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if here.ledger is not None:
            here.ledger.record(normalise_key(key), join_prefix(here.prefix, key))
        return path

    @overload
    def read_all(self, keys: str) -> Path: ...
    @overload
    def read_all(self, keys: list[str]) -> list[Path]: ...
    @overload
    def read_all(self, keys: tuple[str, ...]) -> tuple[Path, ...]: ...
    @overload
    def read_all(self, keys: dict[K, str]) -> dict[K, Path]: ...
    @overload
    def read_all(self, keys: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any: ...
    def read_all(self, keys: Any) -> Any:
        """`read` each key of a str, list, tuple or dict (its values), at any depth; return the paths in the same shape."""
        return _map_keys(self.read, keys)

    @overload
    def write_all(self, keys: str) -> Path: ...
    @overload
    def write_all(self, keys: list[str]) -> list[Path]: ...
    @overload
    def write_all(self, keys: tuple[str, ...]) -> tuple[Path, ...]: ...
    @overload
    def write_all(self, keys: dict[K, str]) -> dict[K, Path]: ...
    @overload
    def write_all(self, keys: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any: ...
    def write_all(self, keys: Any) -> Any:
        """`write` each key of a str, list, tuple or dict (its values), at any depth; return the paths in the same shape."""
        return _map_keys(self.write, keys)

    def __repr__(self) -> str:
        return f"<dls.run prefix={self.prefix!r} root={str(self.root)!r} invocation_id={self.invocation_id!r}>"


def _map_keys(path_of: Callable[[str], Path], keys: Any) -> Any:
    if isinstance(keys, dict):
        return {name: _map_keys(path_of, key) for name, key in cast("Mapping[Any, Any]", keys).items()}
    if isinstance(keys, (list, tuple)):
        paths = [_map_keys(path_of, key) for key in cast("list[Any]", keys)]
        return tuple(paths) if isinstance(keys, tuple) else paths
    return path_of(keys)


run = Run()


class BodyContext:
    """The context of one running body: its record, which is in force only while a step of the body runs, and its ledger.

    A `def` or `async def` body is one step, a generator body is one step for each item. Between two steps the caller's
    record is in force. The next step restores the record with which the body ended the last one, an inner `dls.scope`
    included.
    """

    __slots__ = ("_base", "_inner", "_ledger", "_returned")

    def __init__(self, root: Path | None, prefix: str, invocation_id: str | None, attempt: int | None) -> None:
        self._ledger = Ledger()
        self._base = ContextRecord(root, prefix, invocation_id, attempt, self._ledger)
        self._inner = self._base
        self._returned = ReturnedKeys(self._ledger, prefix)

    def step(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call `fn(*args, **kwargs)` inside this context."""
        outer = _current.get()
        _current.set(self._inner)
        try:
            return fn(*args, **kwargs)
        finally:
            self._inner = _restore(self._base, outer) or self._inner

    async def astep(self, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        """Await `fn(*args, **kwargs)` inside this context; cancelling it cancels what it awaits."""
        outer = _current.get()
        _current.set(self._inner)
        try:
            return await fn(*args, **kwargs)
        finally:
            self._inner = _restore(self._base, outer) or self._inner

    def add_yielded(self, item: object) -> None:
        """Record one yielded item."""
        self._returned.add(item)

    def check_yielded(self, fn: object) -> None:
        """Raise KeyContractError when the completed generator body `fn` wrote a key that no item holds."""
        self._returned.check(_name_of(fn), "yield")

    def check_value(self, value: object, fn: object) -> None:
        """Raise KeyContractError when the completed body `fn` wrote a key that the value it returned does not hold."""
        if self._ledger:  # a body that wrote no key need not be searched for keys
            self._returned.add(value)
            self._returned.check(_name_of(fn))


def _name_of(fn: object) -> str:
    return f"function {getattr(fn, '__qualname__', None) or type(fn).__qualname__!r}"


def local_context() -> BodyContext:
    """The context of one local call: that of the caller, with a ledger of its own."""
    here = _current.get()
    return BodyContext(here.root, here.prefix, here.invocation_id, here.attempt)


def invocation_context(
    root: str | os.PathLike[str], prefix: str, invocation_id: str | None, attempt: int | None
) -> BodyContext:
    """The context of one invocation's body. Raises KeyContractError when `prefix`, which was submitted, is not a key."""
    base = root if isinstance(root, Path) and root.is_absolute() else Path(root).absolute()
    return BodyContext(base, join_prefix("", prefix), invocation_id, attempt)
