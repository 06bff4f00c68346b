"""Where a function's keys lead: `dls.scope`, `dls.run`, and the record of the call that is running.

All of it hangs on one context variable that holds one immutable record. Tasks and anyio's worker threads inherit it;
a thread of one's own inherits it through `contextvars.copy_context().run`.
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

__all__ = ["Call", "Current", "Run", "call_scope", "current_invocation", "invocation_scope", "run", "scope"]

T = TypeVar("T")
K = TypeVar("K")


class Current(NamedTuple):
    """What `dls.run` reads. `root` None: the current folder, looked up at each use; `ledger` None: outside any call."""

    root: Path | None = None
    prefix: str = ""
    invocation_id: str | None = None
    attempt: int | None = None
    ledger: Ledger | None = None
    around: Current | None = None  # the record of the scope around this one, within the same call


_current: ContextVar[Current] = ContextVar("dreamlake.lakeshore.body.context", default=Current())  # noqa: B039 -- immutable


def _restore(mine: Current, outer: Current) -> Current | None:
    """Leave `mine`, or what was entered inside it, for `outer`, and give what was left.

    None when something else is in force: then this is not where `mine` was entered, but an abandoned generator or
    coroutine being closed in the middle of other code, by the garbage collector perhaps, and nothing is touched. Tokens
    cannot tell: a generator may leave a scope in another context than it entered it in, or be collected in the same.
    """
    now = one = _current.get()
    while one is not mine:
        if one.around is None:
            return None
        one = one.around
    _current.set(outer)
    return now


def current_invocation() -> str | None:
    """The id of the invocation whose body is running here, or None."""
    return _current.get().invocation_id


@contextmanager
def scope(sub: str = "", *, root: str | os.PathLike[str] | None = None) -> Generator[Run]:
    """Within the block keys are read below `sub`, itself read below the prefix around it; and below `root`, if given.

    Gives `dls.run`. Scopes nest, and leaving one restores what was before, also after an exception. A relative `root`
    is taken from the current folder at once. Raises KeyContractError when `sub` is no key or climbs out of the root.
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
    """The surroundings of the running code: which keys it sees, and as which invocation it runs.

    Outside any scope and invocation the prefix is '' and the root the current folder.
    """

    __slots__ = ()

    @property
    def root(self) -> Path:
        """The folder below which all keys lie."""
        return _current.get().root or Path.cwd()

    @property
    def prefix(self) -> str:
        """What keys are read below, seen from the root; '' is the root itself."""
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
        """The path of what is there under `key`.

        Raises KeyContractError when nothing is, when `key` is no key, or when it leads out of the root.
        """
        path = resolve(self.root, self.prefix, key)
        if not path.exists():
            raise KeyContractError(
                f"nothing is there under key {key!r} (prefix {self.prefix!r}, root {str(self.root)!r}): "
                "write it first, or check the key, the dls.scope around the call and the root"
            )
        return path

    def write(self, key: str, dir: bool = False) -> Path:
        """The path to write `key` to; makes the folders above it, with `dir` also the folder itself.

        The function must return the key. Raises KeyContractError when `key` is no key or leads out of the root, OSError
        when a folder cannot be made.
        """
        now = _current.get()
        path = resolve(self.root, now.prefix, key)
        (path if dir else path.parent).mkdir(parents=True, exist_ok=True)
        if now.ledger is not None:
            now.ledger.record(normalise_key(key), join_prefix(now.prefix, key))
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
        """`read` for each key of a str, list, tuple or dict (its values), at any depth; paths in the same shape."""
        return _mirrored(self.read, keys)

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
        """`write` for each key of a str, list, tuple or dict (its values), at any depth; paths in the same shape."""
        return _mirrored(self.write, keys)

    def __repr__(self) -> str:
        return f"<dls.run prefix={self.prefix!r} root={str(self.root)!r} invocation_id={self.invocation_id!r}>"


def _mirrored(one: Callable[[str], Path], keys: Any) -> Any:
    if isinstance(keys, dict):
        return {name: _mirrored(one, key) for name, key in cast("Mapping[Any, Any]", keys).items()}
    if isinstance(keys, (list, tuple)):
        paths = [_mirrored(one, key) for key in cast("list[Any]", keys)]
        return tuple(paths) if isinstance(keys, tuple) else paths
    return one(keys)


run = Run()


class Call:
    """The surroundings of one running body: its record, in force only while a step of the body runs, and its ledger.

    A `def` or `async def` body is one step, a generator body one for each item. Between two steps the caller has its
    own record back, and the next step finds the one that the body left, an inner `dls.scope` included.
    """

    __slots__ = ("_base", "_inner", "_ledger", "_returned")

    def __init__(self, root: Path | None, prefix: str, invocation_id: str | None, attempt: int | None) -> None:
        self._ledger = Ledger()
        self._base = self._inner = Current(root, prefix, invocation_id, attempt, self._ledger)
        self._returned = ReturnedKeys(self._ledger, prefix)

    def step(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """`fn(*args, **kwargs)` inside this call's surroundings."""
        outer = _current.get()
        _current.set(self._inner)
        try:
            return fn(*args, **kwargs)
        finally:
            self._inner = _restore(self._base, outer) or self._inner

    async def astep(self, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        """`await fn(*args, **kwargs)` inside this call's surroundings; cancelling it cancels what it awaits."""
        outer = _current.get()
        _current.set(self._inner)
        try:
            return await fn(*args, **kwargs)
        finally:
            self._inner = _restore(self._base, outer) or self._inner

    def see(self, item: object) -> None:
        """Take note of one yielded item."""
        self._returned.see(item)

    def check(self, fn: object) -> None:
        """The end of a completed generator body `fn`: KeyContractError when a key that it wrote was in no item."""
        self._returned.check(_named(fn), "yield")

    def check_value(self, value: object, fn: object) -> None:
        """The end of a completed `def` or `async def` body: the same for the value that it returned."""
        if self._ledger:  # without a written key there is nothing to look for in it
            self._returned.see(value)
            self._returned.check(_named(fn))


def _named(fn: object) -> str:
    return f"function {getattr(fn, '__qualname__', None) or type(fn).__qualname__!r}"


def call_scope() -> Call:
    """The surroundings of one local call: those of the caller, with a ledger of its own."""
    now = _current.get()
    return Call(now.root, now.prefix, now.invocation_id, now.attempt)


def invocation_scope(root: str | os.PathLike[str], prefix: str, invocation_id: str | None, attempt: int | None) -> Call:
    """The surroundings of one invocation's body. KeyContractError when `prefix`, which came from afar, is no key."""
    base = root if isinstance(root, Path) and root.is_absolute() else Path(root).absolute()
    return Call(base, join_prefix("", prefix), invocation_id, attempt)
