"""The command line that docker and podman share."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import anyio

from ...errors import DispatchError
from ..attached_client import EngineUnreachable
from ..commands import CommandResult, run_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ContainerEngine", "ContainerState", "no_program"]

CALL_TIMEOUT = 60.0
"""Seconds within which an engine answers a request that waits for nothing."""
_RUNNING = {"running", "paused", "restarting", "stopping"}


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What an engine reports about a container."""

    running: bool
    started: bool
    code: int
    out_of_memory: bool
    error: str


class ContainerEngine:
    """An engine, called by its command line."""

    def __init__(self, binary: str, arguments: Sequence[str] = ()) -> None:
        """`arguments` stand before each command."""
        self.argv = [os.path.abspath(binary) if os.sep in binary else binary, *arguments]
        self.program = os.path.basename(binary)

    async def call(
        self,
        *args: str,
        timeout: float = CALL_TIMEOUT,
        environ: Mapping[str, str] | None = None,
        input: bytes | None = None,
    ) -> CommandResult:
        """Run a command. Raises EngineUnreachable when it takes longer than `timeout` seconds."""
        try:
            return await run_command([*self.argv, *args], timeout=timeout, environ=environ, input=input)
        except DispatchError as exc:
            if shutil.which(self.argv[0]) is None:
                raise EngineUnreachable(no_program(self.argv[0])) from exc
            raise EngineUnreachable(f"{self.program} did not answer `{args[0]}` within {timeout:g} s") from exc

    async def check(self) -> None:
        """Raise EngineUnreachable if the engine does not work, with what is wrong."""
        result = await self.call("version")
        if result.code != 0:
            raise EngineUnreachable(f"the engine of {self.program} cannot be reached: {result.message}")

    async def find(self, filter: str) -> list[str]:
        """Return the ids of the containers that match the filter, also of those that have ended."""
        result = await self.call("ps", "-a", "-q", "--no-trunc", "--filter", filter)
        if result.code != 0:
            await self.check()
            raise EngineUnreachable(f"{self.program} could not list its containers: {result.message}")
        return result.stdout.split()

    async def inspect(self, name: str) -> ContainerState | None:
        """Return the state of a container; None where there is none."""
        result = await self.call("inspect", "--type", "container", "--format", "{{json .State}}", name)
        if result.code != 0:
            if await self.find(f"name=^{name}$"):
                raise EngineUnreachable(f"{self.program} could not inspect {name}: {result.message}")
            return None
        try:
            found = cast("dict[str, object]", json.loads(result.stdout))
        except ValueError:
            raise EngineUnreachable(f"expected JSON from {self.program} for {name}, got {result.message}") from None
        code = found.get("ExitCode")
        return ContainerState(
            running=found.get("Status") in _RUNNING,
            started=not str(found.get("StartedAt") or "0001-").startswith("0001-"),
            code=code if isinstance(code, int) else 1,
            out_of_memory=found.get("OOMKilled") is True,
            error=str(found.get("Error") or ""),
        )

    async def remove(self, filter: str) -> bool:
        """Kill and remove the containers that match the filter, and wait until they are gone.

        Returns:
            Whether there were any.

        Raises:
            EngineUnreachable: They are still there after CALL_TIMEOUT.
        """
        with anyio.move_on_after(CALL_TIMEOUT):
            any = False
            while found := await self.find(filter):
                any = True
                await self.call("kill", "--signal", "KILL", *found)  # podman's `rm -f` waits for a grace
                await self.call("rm", "-f", "-v", *found)
            return any
        raise EngineUnreachable(f"{self.program} has not removed the container with {filter} within {CALL_TIMEOUT:g} s")


def no_program(binary: str) -> str:
    return f"there is no program {binary!r} here: install it, or name another with --runner-option binary=PATH"
