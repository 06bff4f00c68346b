"""The wire and the package itself: packing against bare msgpack, copies of an array, the import, a local call."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import subprocess
import sys
import time
import timeit
from typing import TYPE_CHECKING, Any

from children import Children

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.wire import pack, unpack
from dreamlake.lakeshore.wire._msgpack import packb, unpackb

if TYPE_CHECKING:
    from collections.abc import Callable

    from figures import Bench

__all__ = ["array", "import_time", "local_call", "wire"]

NESTED = [{"id": n, "name": f"row {n}", "score": n / 7, "tags": ["a", "bc"], "on": n % 2 == 0} for n in range(19)]
"""About a kilobyte of nested plain data."""


def _refuse(value: object) -> Any:
    raise TypeError(f"cannot pack {value!r}")


def _keep(code: int, data: bytes) -> Any:
    return code, data


def wire(bench: Bench) -> None:
    """Plain data through `pack` and `unpack`, and through msgpack with the same options."""
    times = bench.size(3_000, 500)
    data = pack(NESTED)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "pack-1kb": (
            functools.partial(packb, NESTED, default=_refuse, strict_types=True),
            functools.partial(pack, NESTED),
        ),
        "unpack-1kb": (
            functools.partial(unpackb, data, ext_hook=_keep, strict_map_key=False),
            functools.partial(unpack, data),
        ),
    }
    for _ in bench.each_round():
        for name, (bare, ours) in pairs.items():
            least, took = _fastest(bare, times), _fastest(ours, times)
            bench.add(name, "us", took * 1e6, took / least)


def _fastest(fn: Callable[[], Any], times: int) -> float:
    """Seconds of one call: the best of some series, which the least disturbed the machine."""
    return min(timeit.repeat(fn, number=times // 10, repeat=10)) / (times // 10)


def array(bench: Bench) -> None:
    """An array of 100 MB: how many times its size packing and unpacking take at the most, at once."""
    if importlib.util.find_spec("numpy") is None:
        print("numpy is not installed: no figures of arrays", file=sys.stderr)
        return
    size = bench.size(100_000_000, 10_000_000)
    names = {"alone": "unpack-array-100mb", "in-list": "unpack-array-in-list", "in-tuple": "unpack-array-in-tuple"}
    with Children(bench.backend) as children:
        process = children.start("arrays").ready()
        for _ in bench.each_round():
            for shape, name in names.items():
                told = process.ask("measure", shape=shape, size=size)
                if shape == "alone":
                    bench.add("pack-array-100mb", "ms", told["pack"]["seconds"] * 1e3, told["pack"]["bytes"] / size)
                bench.add(name, "ms", told["unpack"]["seconds"] * 1e3, told["unpack"]["bytes"] / size)


def import_time(bench: Bench) -> None:
    """A python that imports the package, over one that does nothing."""
    for _ in bench.each_round():
        took: dict[str, list[float]] = {"pass": [], "import dreamlake.lakeshore": []}
        for _ in range(bench.size(10, 3)):
            for code, seconds in took.items():
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], check=True)
                seconds.append(time.perf_counter() - started)
        bare, ours = (statistics.median(seconds) for seconds in took.values())
        bench.add("import", "ms over bare python", (ours - bare) * 1e3)


def local_call(bench: Bench) -> None:
    """Calling a decorated function here, over calling the function."""
    times = bench.size(100_000, 10_000)
    decorated = dls.udf(_plain)
    for _ in bench.each_round():
        took = _fastest(lambda: decorated(1), times) - _fastest(lambda: _plain(1), times)
        bench.add("local-call", "us over the plain call", took * 1e6)


def _plain(x: int) -> int:
    return x
