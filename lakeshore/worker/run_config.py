"""The fields of a submit's `run_config` that concern a child process, and whether the worker allows them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

from ..body.execute import describe_exception
from ..errors import TransportError, WireError
from ..wire import unpack

__all__ = ["RunConfig"]

logger = logging.getLogger("dreamlake.lakeshore.worker")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What the submitter asked for beyond the call itself."""

    prefix: str
    """The prefix of keys, if the envelope has none."""
    script: str | None
    """A shell command to run in place of the child entry."""
    as_user: str | None
    """The account to run the child as."""

    @classmethod
    def read(cls, config: bytes | None) -> RunConfig:
        """Read the packed `config` of a claim. Bytes that cannot be read count as no fields.

        Raises:
            ValueError: A field is not text.
        """
        fields = _fields(config)
        return cls(_text(fields, "prefix") or "", _text(fields, "script"), _text(fields, "as_user"))

    def check_allowed(self, id: str, *, script: bool, as_user: bool) -> None:
        """Raise TransportError if a field is set that the worker does not allow."""
        if self.script is not None and not script:
            raise TransportError(_not_allowed(id, "script", "a shell command of the submitter's"))
        if self.as_user is not None and not as_user:
            raise TransportError(_not_allowed(id, "as_user", "its body as the user that the submitter names"))


def _fields(config: bytes | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        found: Any = unpack(config)
    except WireError as exc:
        logger.debug("a run_config cannot be read: %s", describe_exception(exc).message)
        return {}
    if not isinstance(found, dict):
        return {}
    fields: Any = cast("dict[str, Any]", found).get("run_config")
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValueError(f"expected `{name}` of the run_config to be text, got {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"expected `{name}` of the run_config to be text without NUL, got {value[:80]!r}")
    return value


def _not_allowed(id: str, name: str, what: str) -> str:
    return (
        f"invocation {id!r} asks with `{name}` for {what}, which this worker refuses: start it with "
        f"--allow-{name.replace('_', '-')} if everybody who can submit may do that there"
    )
