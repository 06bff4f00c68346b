"""Describe the call in an envelope for people. Nothing is imported or unpickled."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import WireError
from .output import jsonable

if TYPE_CHECKING:
    from ..wire import Envelope

__all__ = ["Called", "describe_body", "function_name"]

MAX_SHOWN_BYTES = 1 << 20
"""Bytes of arguments that are decoded for display; more are only counted."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 8


@dataclass(frozen=True)
class Called:
    """A function and its arguments as far as they can be decoded; `unreadable` is the reason otherwise."""

    fn: dict[str, Any] | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    prefix: str = ""
    unreadable: str | None = None

    @property
    def name(self) -> str:
        """The qualified name, with its module if the envelope has it."""
        return ".".join(filter(None, (self._text("module"), self._text("qualname")))) or "?"

    @property
    def pickled(self) -> str | None:
        """The place where the function was pickled; None for a function that travels by name."""
        return (self._text("where") or "?") if self._text("kind") == "pickle" else None

    def _text(self, field: str) -> str | None:
        """A field of the function if it is text: the submitter may have put anything there."""
        value = (self.fn or {}).get(field)
        return value if isinstance(value, str) else None

    def as_document(self) -> dict[str, Any]:
        """The same for JSON."""
        fields = {"function": self.fn, "args": self.args, "kwargs": self.kwargs, "prefix": self.prefix}
        try:
            return {name: jsonable(value) for name, value in fields.items()} | {"unreadable": self.unreadable}
        except RecursionError:
            return dict.fromkeys(fields) | {"unreadable": "it is nested too deep to be shown"}

    def __str__(self) -> str:
        if self.fn is None or self.args is None:
            return f"{'?' if self.fn is None else self.name} ({self.unreadable})"
        named = [f"{name}={_short.repr(value)}" for name, value in (self.kwargs or {}).items()]
        return f"{self.name}({', '.join([*map(_short.repr, self.args), *named])})"


def function_name(body: bytes) -> str | None:
    """The name of the function in an envelope; None for bytes that are not an envelope."""
    from ..wire import Envelope

    try:
        return Called(Envelope.from_bytes(body).fn).name
    except WireError:
        return None


def describe_body(body: bytes) -> Called:
    """Describe the call in an envelope, or why it cannot be decoded here."""
    from ..wire import Envelope

    try:
        envelope = Envelope.from_bytes(body)
    except WireError as exc:
        return Called(unreadable=f"{len(body)} bytes, for those who claim by hand: {exc}")
    fn = {name: value for name, value in envelope.fn.items() if name != "blob"}
    args, kwargs, unreadable = _arguments(envelope)
    return Called(fn, args, kwargs, envelope.prefix, unreadable)


def _arguments(envelope: Envelope) -> tuple[list[Any] | None, dict[str, Any] | None, str | None]:
    size = len(envelope.args) + len(envelope.kwargs)
    if size > MAX_SHOWN_BYTES:
        return None, None, f"{size} bytes of arguments"
    try:
        args, kwargs = envelope.arguments()
        return args, kwargs, None
    except (WireError, ImportError) as exc:
        return None, None, f"{size} bytes of arguments that cannot be read here: {exc}"
