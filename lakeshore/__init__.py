"""Run a Python function somewhere else, and pick up its result by a durable id.

    import dreamlake.lakeshore as dls

    @dls.udf(queue="gpu")
    def embed(text: str) -> list[float]: ...

Importing this package loads none of its dependencies: each public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import wire as wire
    from .body.context import run as run
    from .body.context import scope as scope
    from .client.default_plane import default_dispatch as default_dispatch
    from .client.job import Job as Job
    from .client.queue import Queue as Queue
    from .client.queue import SyncQueue as SyncQueue
    from .client.thunk import Thunk as Thunk
    from .client.thunk import thunk as thunk
    from .client.udf import UDF as UDF
    from .client.udf import udf as udf
    from .errors import ClaimLost as ClaimLost
    from .errors import DispatchError as DispatchError
    from .errors import EncodeError as EncodeError
    from .errors import InvocationFailed as InvocationFailed
    from .errors import InvocationKilled as InvocationKilled
    from .errors import InvocationNotFound as InvocationNotFound
    from .errors import InvocationTimedOut as InvocationTimedOut
    from .errors import KeyContractError as KeyContractError
    from .errors import LakeshoreError as LakeshoreError
    from .errors import NotAuthorized as NotAuthorized
    from .errors import PlaneUnavailable as PlaneUnavailable
    from .errors import StreamRestarted as StreamRestarted
    from .errors import TransportError as TransportError
    from .errors import WireError as WireError
    from .planes.http.store import HttpDispatch as HttpDispatch
    from .planes.mongo.store import MongoDispatch as MongoDispatch
    from .planes.sqlite.store import Dispatch as Dispatch
    from .worker.loop import run_worker as run_worker

_ERRORS = (
    "ClaimLost",
    "DispatchError",
    "EncodeError",
    "InvocationFailed",
    "InvocationKilled",
    "InvocationNotFound",
    "InvocationTimedOut",
    "KeyContractError",
    "LakeshoreError",
    "NotAuthorized",
    "PlaneUnavailable",
    "StreamRestarted",
    "TransportError",
    "WireError",
)
_HOMES = dict.fromkeys(_ERRORS, ".errors") | {
    "Dispatch": ".planes.sqlite.store",
    "HttpDispatch": ".planes.http.store",
    "Job": ".client.job",
    "MongoDispatch": ".planes.mongo.store",
    "Queue": ".client.queue",
    "SyncQueue": ".client.queue",
    "Thunk": ".client.thunk",
    "UDF": ".client.udf",
    "default_dispatch": ".client.default_plane",
    "run": ".body.context",
    "run_worker": ".worker.loop",
    "scope": ".body.context",
    "thunk": ".client.thunk",
    "udf": ".client.udf",
    "wire": ".wire",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] -- one list, of which the lookup is made too


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(home, __name__)
    value = module if name == "wire" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
