"""The rooms of the package and the floors they stand on, as data. tests/test_layering.py compares the package with it.

A module may import modules of lower floors and, on its own floor, any that does not import it back, directly or through
others. Imports inside functions count like any other; those under `if TYPE_CHECKING` are for type checkers and are free.
"""

from __future__ import annotations

FLOORS = (
    # From the ground up. A module belongs to the longest of these names that is a prefix of its own.
    ("errors", "settings", "ids", "limits"),
    ("concurrency", "wire"),
    ("planes.contract",),
    ("planes", "planes.protocol"),
    ("planes.sqlite", "planes.mongo", "planes.http"),
    ("functions",),
    ("body",),
    # The child's side of a process boundary stands below the worker: the worker prepares folders that the child reads.
    ("client", "daemon"),
    ("worker",),
    ("runners",),
    ("server",),
    ("cli", "testing"),
)

STRANGERS = ("planes.sqlite", "planes.mongo", "planes.http")
"""Rooms of one floor that may not import each other at all."""

DRIVERS = {
    # A third-party package and the rooms that may import it. `anyio` is not among them: everything may use it.
    "aiosqlite": ("planes.sqlite",),
    "bson": ("planes.mongo",),
    "click": ("cli",),
    "cloudpickle": ("functions",),
    "h11": ("planes.http",),
    "httpx": ("planes.http", "runners"),
    "hypothesis": ("testing",),
    "msgpack": ("wire",),
    "numpy": ("wire",),
    "PIL": ("wire",),
    "prometheus_client": ("server",),
    "pymongo": ("planes.mongo",),
    "redis": ("planes.mongo",),
    "rich": ("cli",),
    "starlette": ("server",),
    "torch": ("wire",),
    "ulid": ("ids",),
    "uvicorn": ("server",),
    "yaml": ("runners",),
}

HEAVY = {"ulid", "trio", "pymongo", "numpy", "PIL", "torch", "redis", "yaml", "cloudpickle", "anyio"}
"""Third-party packages that a function may import, so that those who do not need them do not pay for them."""

LATE = {
    # Modules of our own that a function imports, and why. Everything else is imported at the top of its file.
    ("cli", "*"): "a command loads what it needs, so that `lakeshore --help` is quick",
    ("client.default_plane", "planes.http.store"): "a program uses one kind of plane, and loads one driver",
    ("client.default_plane", "planes.sqlite.store"): "a program uses one kind of plane, and loads one driver",
    ("client.thunk", "client.envelopes"): "making a Thunk loads no codec",
    ("client.udf", "client.remote_udf"): "a local call loads no event loop and no driver",
    ("functions.resolve", "functions.pickles"): "only those who pickle functions load cloudpickle",
    ("functions.serialize", "functions.pickles"): "only those who pickle functions load cloudpickle",
    ("planes.http.attempt", "planes.http.httpx_pool"): "httpx is loaded for TLS, proxies and transports of the caller",
    ("planes.mongo.store", "planes.mongo.redis_news"): "redis is optional",
    ("server", "server.app"): "the package's name is there without its extra",
    ("wire", "wire.stdlib_values"): "decimal, uuid and zoneinfo are loaded by programs that use STDLIB",
}

DEBTS: set[tuple[str, str]] = set()
"""Imports that still climb or go round in a circle. To be kept empty."""
