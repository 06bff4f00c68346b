"""The Envelope: one invocation as it travels. Planes and servers store and forward its bytes without reading them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import WireError
from .codec import dump, spliced, unpack
from .values import kind_of

if TYPE_CHECKING:
    from .registry import Buffer

__all__ = ["WIRE_VERSION", "Envelope"]

WIRE_VERSION = 1

_ABSENT: dict[str, Any] = {"args": b"", "kwargs": b"", "prefix": "", "key": None, "cfg": None, "parent": None}
_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "fn": (dict,),
    "args": (bytes,),
    "kwargs": (bytes,),
    "prefix": (str,),
    "key": (str, type(None)),
    "cfg": (dict, type(None)),
    "parent": (str, type(None)),
}
_FIELDS = ("v", *_TYPES)
"""The fields in the order in which `to_bytes` writes them."""
_USUAL_TYPES = {
    (int, str, dict, bytes, bytes, str, key, dict, parent) for key in (str, type(None)) for parent in (str, type(None))
}


@dataclass
class Envelope:
    """One remote invocation.

    Unknown keys of `cfg` and, in `extra`, of the top level survive decoding and encoding.
    """

    id: str
    fn: dict[str, Any]
    """The function: a reference or a pickle."""
    args: bytes = b""
    """The positional arguments, packed; they stay so until `arguments` is called."""
    kwargs: bytes = b""
    """The keyword arguments, packed."""
    prefix: str = ""
    """The prefix of the scope in which it was submitted."""
    key: str | None = None
    """The idempotency key."""
    cfg: dict[str, Any] | None = field(default_factory=dict[str, Any])
    """Anything else that the sender has for the worker."""
    parent: str | None = None
    """The id of the invocation that submitted this one."""
    v: int = WIRE_VERSION
    extra: dict[Any, Any] = field(default_factory=dict[Any, Any], kw_only=True)
    """Fields of the top level that this version does not know."""

    def to_bytes(self) -> bytes:
        """The packed Envelope. Raises EncodeError when `fn`, `cfg` or `extra` holds what cannot be packed."""
        fields: dict[Any, Any] = {
            "v": self.v,
            "id": self.id,
            "fn": self.fn,
            "args": spliced(self.args),
            "kwargs": spliced(self.kwargs),
            "prefix": self.prefix,
            "key": self.key,
            "cfg": self.cfg,
            "parent": self.parent,
        }
        for name in self.extra:
            if name in fields:
                raise ValueError(f"Envelope.extra holds {name!r}, which is a field of its own: set the field")
        if self.extra:
            fields.update(self.extra)
        return dump(fields, fields)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Envelope:
        """Read an Envelope; its arguments stay packed.

        Raises WireError for bytes that are no Envelope and for one of a newer version.
        """
        fields = unpack(data)
        if kind_of(fields) is not dict:
            raise WireError(f"not an Envelope: expected a map, got {_article(fields)}; submit with Envelope.to_bytes()")
        if (
            tuple(fields) == _FIELDS
            and tuple(map(type, fields.values())) in _USUAL_TYPES
            and fields["v"] == WIRE_VERSION
        ):
            _, *rest = fields.values()
            return cls(*rest)  # as `to_bytes` writes it: the usual case, in a third of the time
        _check_version(fields.pop("v", None))
        known: dict[str, Any] = {}
        for name, types in _TYPES.items():
            if name not in fields and name not in _ABSENT:
                raise WireError(f"not an Envelope: the field {name!r} is missing; submit with Envelope.to_bytes()")
            if name not in fields:
                continue
            value = fields.pop(name)
            if kind_of(value) not in types and not (value is None and name in _ABSENT):
                raise WireError(
                    f"not an Envelope: the field {name!r} should be {types[0].__name__}, but is {_article(value)}; "
                    "submit with Envelope.to_bytes()"
                )
            known[name] = _ABSENT[name] if value is None else value
        return cls(**known, extra=fields)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments, unpacked now; empty bytes mean none. Raises WireError."""
        args: Any = unpack(self.args) if self.args else []
        kwargs: Any = unpack(self.kwargs) if self.kwargs else {}
        if kind_of(args) is not list:
            raise WireError(f"args of invocation {self.id!r} should be a packed list, but are {_article(args)}")
        if kind_of(kwargs) is not dict or any(kind_of(name) is not str for name in kwargs):
            what = "a map with other keys" if kind_of(kwargs) is dict else _article(kwargs)
            raise WireError(f"kwargs of invocation {self.id!r} should be a packed map with str keys, but are {what}")
        return args, kwargs


def _check_version(version: object) -> None:
    if type(version) is not int or version < 1:
        raise WireError(
            f"not an Envelope: its version 'v' should be an integer from 1, but is {version!r:.40}; "
            "submit with Envelope.to_bytes()"
        )
    if version > WIRE_VERSION:
        raise WireError(
            f"the Envelope is of version {version}, and this side reads versions up to {WIRE_VERSION}: "
            "upgrade dreamlake-lakeshore here"
        )


def _article(value: object) -> str:
    return "nil" if value is None else f"a {type(value).__name__}"
