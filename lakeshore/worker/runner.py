"""The interface between the child executor and an engine: a `Runner` starts child processes, waits for them, ends them.

This is what the authors of runners implement. It stands apart from `executor`, which is what the worker loop needs: a runner
knows neither claims nor outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..concurrency.tasks import run_to_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ..daemon.workdir import Folder
    from ..planes.contract.records import Failure

__all__ = ["Exit", "Launch", "Process", "Runner", "start_or_undo"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a runner starts: the child entry, or the shell command `script`, in `folder.path`.

    The runner passes `folder.lock` on to the child where its engine can, and records the child's process group in `folder`.
    """

    id: str
    """The id of the invocation."""
    attempt: int
    """The number of its attempt, from 1."""
    folder: Folder
    """The child's working folder, which is locked."""
    environ: Mapping[str, str]
    """Variables to add to the child's environment."""
    script: str | None
    """A command for `bash -c` in place of the child entry."""
    as_user: str | None
    """The account to run the child as."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended."""

    code: int
    """The exit code; negative for the signal that killed the child."""
    state: str = "failed"
    """The state of the outcome if there is an `error`. `timeout` and `killed` are not retried. `lost` without an error:
    the runner lost the child, and the files in the folder decide what came of it."""
    error: Failure | None = None
    """The engine's own account of the end, which replaces the files in the folder. The type WorkerLost means that the
    engine lost the child through no fault of the child."""
    output: str = ""
    """The end of the child's output, if that is not in the folder."""


class Process(Protocol):
    """One child."""

    async def wait(self) -> Exit:
        """Wait for the child's end. Nothing of the child runs after that. May be cancelled and called again."""
        ...

    async def kill(self) -> Exit:
        """Ask the child to end, kill it after its grace, and wait for its end. Must not be cancelled."""
        ...


class Runner(Protocol):
    """Starts children in one kind of engine. It may serve several event loops, one after another."""

    name: str

    async def start(self, launch: Launch) -> Process:
        """Start a child, which may take as long as the engine needs.

        When cancelled or failing, it leaves nothing behind.

        Raises:
            OSError: The child could not be started.
            LakeshoreError: The same, with the engine's own words.
        """
        ...

    async def aclose(self) -> None:
        """Release what is kept ready for the next child."""
        ...


P = TypeVar("P", bound=Process)


async def start_or_undo(start: Callable[[], Awaitable[P]]) -> P:
    """Await `start()` to its end and return its process. When cancelled, the process has been killed before this raises."""
    started: list[P] = []

    async def run() -> None:
        started.append(await start())

    try:
        await run_to_end(run)
    except BaseException:
        for process in started:
            await run_to_end(process.kill)
        raise
    return started[0]
