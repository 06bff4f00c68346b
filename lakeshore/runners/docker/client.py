"""The command line that docker and podman have in common: what is asked of it, and what its answers mean."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, NamedTuple, cast

import anyio

from ...errors import DispatchError
from ..attached_client import Unreachable
from ..commands import Answer, run_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CALL", "Engine", "State", "no_program"]

CALL = 60.0
"""Seconds within which an engine answers a request that waits for nothing."""
_RUNNING = {"running", "paused", "restarting", "stopping"}


class State(NamedTuple):
    """What an engine says of a container."""

    running: bool
    started: bool
    code: int
    out_of_memory: bool
    error: str


class Engine:
    """The command line of an engine."""

    def __init__(self, binary: str, arguments: Sequence[str] = ()) -> None:
        self.argv = [os.path.abspath(binary) if os.sep in binary else binary, *arguments]
        self.program = os.path.basename(binary)

    async def call(
        self,
        *args: str,
        timeout: float = CALL,
        environ: Mapping[str, str] | None = None,
        input: bytes | None = None,
    ) -> Answer:
        """What the engine answers. Raises Unreachable when it does not in `timeout` seconds."""
        try:
            return await run_command([*self.argv, *args], timeout=timeout, environ=environ, input=input)
        except DispatchError as exc:
            if shutil.which(self.argv[0]) is None:
                raise Unreachable(no_program(self.argv[0])) from exc
            raise Unreachable(f"{self.program} did not answer `{args[0]}` within {timeout:g} s") from exc

    async def check(self) -> None:
        """Raises Unreachable with what is wrong with the engine, if anything is."""
        answer = await self.call("version")
        if answer.code != 0:
            raise Unreachable(f"the engine of {self.program} cannot be reached: {answer.said}")

    async def found(self, filter: str) -> list[str]:
        """The ids of the containers that the filter finds, also of those that have ended."""
        answer = await self.call("ps", "-a", "-q", "--no-trunc", "--filter", filter)
        if answer.code != 0:
            await self.check()
            raise Unreachable(f"{self.program} cannot say which containers there are: {answer.said}")
        return answer.out.split()

    async def look(self, name: str) -> State | None:
        """How it is about a container; None where there is none."""
        answer = await self.call("inspect", "--type", "container", "--format", "{{json .State}}", name)
        if answer.code != 0:
            if await self.found(f"name=^{name}$"):
                raise Unreachable(f"{self.program} cannot say what became of {name}: {answer.said}")
            return None
        try:
            found = cast("dict[str, object]", json.loads(answer.out))
        except ValueError:
            raise Unreachable(f"{self.program} says of {name} what is no JSON: {answer.said}") from None
        code = found.get("ExitCode")
        return State(
            found.get("Status") in _RUNNING,
            not str(found.get("StartedAt") or "0001-").startswith("0001-"),
            code if isinstance(code, int) else 1,
            found.get("OOMKilled") is True,
            str(found.get("Error") or ""),
        )

    async def remove(self, filter: str) -> bool:
        """End and remove the containers that the filter finds, and wait until they are gone; whether there were any.

        Raises Unreachable when they do not go.
        """
        with anyio.move_on_after(CALL):
            any = False
            while found := await self.found(filter):
                any = True
                await self.call("kill", "--signal", "KILL", *found)  # podman's `rm -f` is patient with what runs
                await self.call("rm", "-f", "-v", *found)
            return any
        raise Unreachable(f"{self.program} has not removed the container with {filter} in {CALL:g} s")


def no_program(binary: str) -> str:
    return f"there is no program {binary!r} here: install it, or name another with --runner-option binary=PATH"
