"""What an engine does for a child: start it, wait for it, end it. Everything else is the executor's, in `child`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ..concurrency.tasks import run_to_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ..daemon.workdir import Folder
    from ..planes.contract.records import Failure

__all__ = ["Exit", "Launch", "Process", "Runner", "start_or_undo"]

T = TypeVar("T")


class Launch(NamedTuple):
    """What a runner is to start: the entry, or with `script` a `bash -c`, in `folder.path` and with `environ` added.

    as_user: the account to run it as. The runner has the child inherit `folder.lock` where its engine can, and names the
    process group to `folder`.
    """

    id: str
    attempt: int
    folder: Folder
    environ: Mapping[str, str]
    script: str | None
    as_user: str | None


class Exit(NamedTuple):
    """How a child ended: its exit code, negative for the signal that killed it.

    error: what the engine says of it, which counts in place of what the folder says; state: the outcome's, then, to which
    `timeout` and `killed` are final. An error of type WorkerLost says that the engine lost it through no fault of its own.
    output: the end of what the child wrote, where that is not in the folder.
    """

    code: int
    state: str = "failed"
    error: Failure | None = None
    output: str = ""


class Process(Protocol):
    """One child."""

    async def wait(self) -> Exit:
        """Wait for its end, after which nothing of it runs. May be cancelled and called again."""
        ...

    async def kill(self) -> Exit:
        """Ask it to end, end it when its grace is over, and wait for that. Not to be cancelled."""
        ...


class Runner(Protocol):
    """Starts children in one kind of engine. It may serve several event loops in turn, one at a time."""

    name: str

    async def start(self, launch: Launch) -> Process:
        """Start a child; for as long as the engine takes. Cancelled, or failing, it leaves nothing behind.

        Raises OSError or LakeshoreError with what the engine says.
        """
        ...

    async def aclose(self) -> None:
        """Give up what is kept for the next child."""
        ...


P = TypeVar("P", bound=Process)


async def start_or_undo(start: Callable[[], Awaitable[P]]) -> P:
    """Await `start()` to its end. Cancelled, or failing: what it has started has ended again when this raises."""
    started: list[P] = []

    async def run() -> None:
        started.append(await start())

    try:
        await run_to_end(run)
    except BaseException:
        for one in started:
            await run_to_end(one.kill)
        raise
    return started[0]
