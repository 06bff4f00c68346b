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
    from .context import run as run
    from .context import scope as scope
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
    from .functions.ship import Thunk as Thunk
    from .functions.ship import thunk as thunk
    from .functions.udf import UDF as UDF
    from .functions.udf import udf as udf
    from .planes.http.store import HttpDispatch as HttpDispatch
    from .planes.mongo.store import MongoDispatch as MongoDispatch
    from .planes.sqlite.store import Dispatch as Dispatch
    from .queue import Job as Job
    from .queue import Queue as Queue
    from .queue import default_dispatch as default_dispatch
    from .sync import SyncQueue as SyncQueue
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
    "Job": ".queue",
    "MongoDispatch": ".planes.mongo.store",
    "Queue": ".queue",
    "SyncQueue": ".sync",
    "Thunk": ".functions.ship",
    "UDF": ".functions.udf",
    "default_dispatch": ".queue",
    "run": ".context",
    "run_worker": ".worker.loop",
    "scope": ".context",
    "thunk": ".functions.ship",
    "udf": ".functions.udf",
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
