"""The house as data: which module may import what. tests/test_layering.py compares the package with it.

A module may import what stands in its row, `errors`, and the standard library; the row of a package holds for its
modules that have none. A new module needs a row; a change of the house is a change of this table. Imports inside
functions count like any other; those under `if TYPE_CHECKING` are for checkers and free.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """What one module may import; the name of a package stands for everything in it, `*` for the whole house."""

    ours: str = ""
    """Modules of the package, anywhere in the file."""
    drivers: str = ""
    """Third-party modules."""
    late: str = ""
    """Modules of the package or third-party ones, inside functions only."""


TABLE = {
    "errors": Row(),
    "settings": Row(),
    "ids": Row(late="ulid"),
    "_portal": Row("settings", "anyio"),
    "_loops": Row("settings _portal", "anyio asyncio trio"),
    # bytes: no I/O, no event loop
    "wire._msgpack": Row(drivers="msgpack"),
    "wire.refusals": Row(),
    "wire.registry": Row("settings wire._msgpack wire.refusals", late="wire.values wire.stdlib"),
    "wire.codec": Row("settings wire._msgpack wire.refusals wire.registry", late="wire.values wire.stdlib"),
    "wire.images": Row("wire._msgpack wire.refusals wire.registry wire.codec", late="numpy PIL"),
    "wire.values": Row("wire._msgpack wire.refusals wire.registry wire.codec wire.images", late="numpy PIL torch"),
    "wire.stdlib": Row("wire.refusals wire.registry wire.codec wire.values"),
    "wire.envelope": Row("wire.refusals wire.registry wire.codec wire.values"),
    "wire.frames": Row("wire._msgpack wire.refusals wire.registry wire.codec wire.values"),
    # where work lives
    "planes.operations": Row(),
    "planes.contract": Row("planes.operations"),
    "planes.states": Row("wire planes.contract"),
    "planes.moves": Row("wire planes.contract planes.states"),
    "planes.model": Row("wire planes.contract planes.states planes.moves", "anyio"),
    "planes.batch": Row("_loops", "anyio"),
    "planes.hub": Row("_loops planes.contract", "anyio"),
    "planes.engine": Row("_loops ids planes.contract planes.batch planes.hub", "anyio"),
    "planes.together": Row("planes.contract planes.engine planes.hub", "anyio"),
    "planes.plane": Row("_loops ids planes.contract planes.engine planes.hub planes.together", "anyio"),
    "planes.held": Row("_loops ids planes.contract planes.batch planes.engine planes.hub planes.plane", "anyio"),
    "planes.migrate": Row("planes.contract planes.plane"),
    # the HTTP protocol, for both sides
    "planes.protocol": Row("ids wire planes.contract"),
    "planes.messages": Row("ids planes.contract planes.protocol"),
    "planes.views": Row("planes.contract planes.protocol"),
    "planes.sqlite.rows": Row("planes.contract planes.states"),
    "planes.sqlite.reads": Row("planes.contract planes.states planes.sqlite.rows"),
    "planes.sqlite.claims": Row("planes.contract planes.sqlite.rows"),
    "planes.sqlite.moves": Row("planes.contract planes.sqlite.rows"),
    "planes.sqlite.statements": Row(
        "planes.contract planes.states planes.sqlite.rows planes.sqlite.claims planes.sqlite.moves"
    ),
    "planes.sqlite.bells": Row("_loops", "anyio"),
    "planes.sqlite.presence": Row("planes.sqlite.bells"),
    "planes.sqlite.database": Row("_loops settings planes.contract planes.sqlite.presence", "anyio aiosqlite"),
    "planes.sqlite.direct": Row("planes.sqlite.presence planes.sqlite.database"),
    "planes.sqlite.store": Row(
        "_loops settings planes.contract planes.plane planes.sqlite.rows planes.sqlite.reads planes.sqlite.claims "
        "planes.sqlite.statements planes.sqlite.bells planes.sqlite.presence planes.sqlite.database "
        "planes.sqlite.direct planes.sqlite.moves planes.engine",
        "anyio aiosqlite",
    ),
    "planes.http.connections": Row("", "anyio httpx"),
    "planes.http.client": Row("_loops ids planes.protocol planes.http.connections", "anyio httpx"),
    "planes.http.plain": Row(
        "_loops wire planes.contract planes.protocol planes.messages planes.views planes.http.client", "anyio"
    ),
    "planes.http.watch": Row(
        "ids planes.contract planes.held planes.protocol planes.views planes.http.client", "anyio"
    ),
    "planes.http.store": Row(
        "_loops planes.contract planes.held planes.protocol planes.messages planes.views planes.http.client "
        "planes.http.connections planes.http.plain planes.http.watch",
        "httpx",
    ),
    "planes.mongo.documents": Row("planes.contract planes.states", "bson"),
    "planes.mongo.clock": Row(drivers="bson"),
    "planes.mongo.updates": Row("planes.contract planes.mongo.documents"),
    "planes.mongo.bodies": Row(drivers="bson"),
    "planes.mongo.births": Row("planes.mongo.documents", "bson"),
    "planes.mongo.connection": Row(
        "_loops planes.mongo.births planes.mongo.bodies planes.mongo.clock planes.mongo.documents",
        "anyio bson pymongo redis",
    ),
    "planes.mongo.submits": Row(
        "planes.contract planes.mongo.bodies planes.mongo.connection planes.mongo.documents", "pymongo"
    ),
    "planes.mongo.claims": Row(
        "ids planes.contract planes.mongo.bodies planes.mongo.connection planes.mongo.documents planes.mongo.updates",
        "anyio bson pymongo",
    ),
    "planes.mongo.changes": Row(
        "planes.contract planes.states planes.mongo.bodies planes.mongo.claims planes.mongo.connection "
        "planes.mongo.documents planes.mongo.updates",
        "pymongo",
    ),
    "planes.mongo.sweeps": Row(
        "planes.contract planes.mongo.changes planes.mongo.claims planes.mongo.connection planes.mongo.documents "
        "planes.mongo.updates"
    ),
    "planes.mongo.news": Row("wire._msgpack planes.contract planes.mongo.documents"),
    "planes.mongo.live": Row(
        "_loops planes.contract planes.mongo.births planes.mongo.connection planes.mongo.news", "anyio redis"
    ),
    "planes.mongo.frames": Row(
        "planes.contract planes.states planes.mongo.bodies planes.mongo.changes planes.mongo.connection "
        "planes.mongo.documents planes.mongo.live planes.mongo.submits planes.mongo.updates",
        "bson pymongo",
    ),
    "planes.mongo.moves": Row(
        "ids planes.contract planes.mongo.bodies planes.mongo.changes planes.mongo.connection planes.mongo.documents "
        "planes.mongo.frames planes.mongo.submits",
        "bson",
    ),
    "planes.mongo.reads": Row(
        "planes.contract planes.mongo.bodies planes.mongo.connection planes.mongo.documents planes.mongo.frames "
        "planes.mongo.updates"
    ),
    "planes.mongo.watch": Row(
        "_loops planes.contract planes.mongo.connection planes.mongo.documents planes.mongo.frames planes.mongo.live "
        "planes.mongo.news",
        "anyio",
    ),
    "planes.mongo.store": Row(
        "planes.contract planes.plane planes.mongo.bodies planes.mongo.changes planes.mongo.claims "
        "planes.mongo.connection planes.mongo.frames planes.mongo.moves planes.mongo.reads planes.mongo.submits "
        "planes.mongo.sweeps planes.mongo.watch",
        "anyio",
        late="planes.mongo.live",
    ),
    # what people write, and how it is called; a local call loads no driver and no event loop
    "keys": Row("settings"),
    "context": Row("settings keys"),
    "calls": Row("settings keys context"),
    "functions.source": Row("settings"),
    "functions.pickles": Row("settings", "cloudpickle"),
    "functions.ship": Row("settings ids keys context calls functions.source", late="wire functions.pickles"),
    "functions.load": Row("settings wire functions.source functions.ship", late="functions.pickles"),
    "streams": Row("_loops wire planes.contract planes.plane", "anyio"),
    "jobs": Row("_loops ids wire planes.contract streams", "anyio", late="worker.leases invoke planes.plane"),
    "queue": Row(
        "settings ids context wire planes.contract planes.plane functions.ship streams jobs",
        "anyio",
        late="planes.sqlite.store planes.http.store sync",
    ),
    "sync": Row("_loops wire planes.contract streams jobs queue"),
    "functions.udf": Row(
        "settings keys context calls functions.source functions.ship",
        late="_loops anyio planes.plane streams queue sync",
    ),
    # who executes
    "invoke": Row("settings wire planes.contract keys context calls functions.load functions.ship", "anyio"),
    "worker.refusals": Row(drivers="anyio"),
    "worker.frames": Row("_loops wire planes.contract planes.plane streams invoke worker.refusals", "anyio"),
    "worker.leases": Row("_loops planes.contract planes.plane worker.refusals", "anyio"),
    "worker.inline": Row("_loops planes.contract invoke", "anyio"),
    "worker.claims": Row(
        "_loops planes.protocol planes.contract planes.plane streams invoke worker.frames worker.refusals", "anyio"
    ),
    "worker.slots": Row(drivers="anyio"),
    "worker.loop": Row(
        "_loops settings ids planes.contract planes.plane functions.load streams queue invoke worker.frames "
        "worker.leases worker.inline worker.claims worker.slots worker.refusals",
        "anyio",
    ),
    "daemon.workdir": Row("settings"),
    "daemon.entry": Row("daemon.workdir wire planes.contract invoke", late="anyio"),
    "worker.tail": Row("wire daemon.workdir"),
    "worker.runner": Row("_loops planes.contract daemon.workdir", "anyio"),
    "worker.child": Row(
        "settings ids wire planes.contract invoke daemon.workdir worker.claims worker.runner worker.tail", "anyio"
    ),
    "daemon.warm": Row("daemon.entry", late="anyio"),
    "worker.runners.groups": Row("daemon.warm worker.runner", "anyio"),
    "worker.runners.options": Row(),
    "worker.runners.commands": Row(drivers="anyio"),
    "worker.runners.process": Row("daemon.workdir worker.runner worker.runners.groups worker.runners.options", "anyio"),
    "worker.runners.followed": Row(
        "planes.contract daemon.workdir worker.runner worker.runners.commands worker.runners.options "
        "worker.runners.process",
        "anyio",
    ),
    "worker.runners.docker_client": Row("worker.runners.commands worker.runners.followed", "anyio"),
    "worker.runners.container": Row(
        "daemon.workdir worker.runner worker.runners.commands worker.runners.followed worker.runners.options "
        "worker.runners.docker_client",
        "anyio",
    ),
    "worker.runners.runsc": Row(
        "settings planes.contract daemon.workdir worker.runner worker.runners.commands worker.runners.followed "
        "worker.runners.options worker.runners.docker_client worker.runners.container",
        "anyio",
    ),
    "worker.runners.slurm_control": Row("_loops daemon.workdir worker.runners.commands", "anyio"),
    "worker.runners.slurm": Row(
        "daemon.workdir planes.contract worker.runner worker.runners.commands worker.runners.options "
        "worker.runners.process worker.runners.slurm_control",
        "anyio",
    ),
    "worker.runners.kube_json": Row(),
    "worker.runners.kube_config": Row("worker.runners.kube_json", late="yaml"),
    "worker.runners.kube_api": Row("worker.runners.kube_config worker.runners.kube_json", "anyio httpx"),
    "worker.runners.kube_job": Row("worker.runner worker.runners.kube_json worker.runners.options"),
    "worker.runners.kube_pods": Row(
        "planes.contract worker.runner worker.runners.kube_job worker.runners.kube_json", "anyio"
    ),
    "worker.runners.kube_watch": Row(
        "_loops planes.contract worker.runner worker.runners.kube_api worker.runners.kube_config worker.runners.kube_job "
        "worker.runners.kube_json worker.runners.kube_pods",
        "anyio",
    ),
    "worker.runners.kube_guard": Row(
        "daemon.workdir worker.runners.kube_api worker.runners.kube_config worker.runners.kube_job "
        "worker.runners.kube_json",
        "anyio",
    ),
    "worker.runners.kube": Row(
        "_loops daemon.workdir planes.contract worker.runner worker.runners.commands worker.runners.options "
        "worker.runners.kube_api worker.runners.kube_config worker.runners.kube_job "
        "worker.runners.kube_json worker.runners.kube_pods worker.runners.kube_watch worker.runners.kube_guard",
        "anyio",
    ),
    "server.tokens": Row("settings"),
    "server.limits": Row(),
    "server.polls": Row(drivers="anyio"),
    "server.requests": Row("wire planes.protocol server.polls", "anyio"),
    "server.routes": Row(
        "settings ids planes.contract planes.plane planes.protocol planes.messages planes.views server.requests "
        "server.limits",
        "anyio",
    ),
    "server.metrics": Row("planes.contract planes.plane planes.protocol", "prometheus_client"),
    "server.app": Row(
        "settings ids planes.contract planes.plane planes.protocol server.routes server.tokens server.requests "
        "server.metrics server.limits",
        "anyio starlette",
    ),
    "server.connections": Row("planes.protocol", "uvicorn"),
    "server.serve": Row(
        "settings planes.plane server.app server.tokens server.limits server.connections", "anyio uvicorn"
    ),
    "cli": Row("settings ids planes.contract queue cli", "anyio click rich", late="*"),
    "__main__": Row("cli.main"),
    "daemon.__main__": Row("cli.main"),
    # for tests, ours and those of plane authors: it stands on everything, nothing stands on it
    "testing": Row("*", "anyio hypothesis"),
}

# Modules, besides `_loops`, that name an event loop because their driver does.
NAME_A_LOOP: set[str] = set()
# Drivers that a second subpackage may import.
SECOND_HOME = {"httpx": "worker.runners"}
# Not a driver but the ground that everything asynchronous stands on.
GROUND = "anyio"
MOST_LINES = 400
# Modules that may be longer.
LONG: set[str] = set()
