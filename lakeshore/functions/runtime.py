"""The runtime record of a pickle, and the policy that decides whether this runtime may load one."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import TransportError

__all__ = ["check_policy", "check_runtime", "shorten", "this_runtime"]

_POLICIES = ("strict", "minor", "off")
_COMPARED_PARTS: dict[str, int | None] = {"python": 2, "cloudpickle": 1}
"""How many parts of a version the policy 'minor' compares; of other fields, and under 'strict', all of them."""


@lru_cache(maxsize=1)
def this_runtime() -> dict[str, Any]:
    """What a pickle of this process needs to be loaded: the versions and the protocol; the platform is for people."""
    import cloudpickle  # only those who pickle functions load it

    untyped: Any = cloudpickle
    return {
        "python": platform.python_version(),
        "impl": sys.implementation.name,
        "cloudpickle": untyped.__version__,
        "pickle_protocol": untyped.DEFAULT_PROTOCOL,
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def check_policy(policy: str) -> None:
    """Raise TransportError unless `policy` is a runtime policy."""
    if policy not in _POLICIES:
        raise TransportError(f"expected the runtime policy 'strict', 'minor' or 'off', got {policy!r}")


def check_runtime(record: Mapping[str, Any], policy: str = "minor") -> None:
    """Raise TransportError unless this runtime may load a pickle that the recorded runtime made.

    Args:
        record: What `this_runtime` returned in the process that pickled.
        policy: "strict": exactly the same python and cloudpickle. "minor": the same major.minor python and the same
            major cloudpickle. Both require the same implementation, and a pickle protocol that this python reads.
            "off": everything passes.
    """
    check_policy(policy)
    if policy == "off":
        return
    if not isinstance(record, Mapping):
        raise TransportError(f"expected a map that describes the submitter's runtime, got {type(record).__name__}")
    here = this_runtime()
    for field in ("impl", "python", "cloudpickle"):
        there = record.get(field)
        parts = _COMPARED_PARTS.get(field) if policy == "minor" else None
        if not isinstance(there, str) or there.split(".")[:parts] != here[field].split(".")[:parts]:
            raise TransportError(
                f"the function was pickled under {_described(record)}, this worker runs {_described(here)}: the runtime "
                f"policy {policy!r} does not let {field} {shorten(there)} pass; use the same on both sides, a function "
                "that the worker can import, or at your own risk the policy 'off'"
            )
    protocol = record.get("pickle_protocol")
    if type(protocol) is not int or protocol > here["pickle_protocol"]:
        raise TransportError(
            f"the function was pickled with protocol {shorten(protocol)}, this worker reads up to "
            f"{here['pickle_protocol']}: run the worker on the submitter's python"
        )


def _described(record: Mapping[str, Any]) -> str:
    python = shorten(record.get("python"))
    implementation = shorten(record.get("impl"))
    cloudpickle = shorten(record.get("cloudpickle"))
    return f"python {python} of {implementation} with cloudpickle {cloudpickle}"


def shorten(value: object) -> str:
    """A submitted value as text for an error: the submitter may have put anything there, of any size and depth."""
    if isinstance(value, str):
        return repr(value if len(value) <= 200 else f"{value[:200]}...")
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
