"""An API server of the tests' own: a real HTTP server that speaks the few routes of Kubernetes which the runner uses.

Objects and what happens to them are the `Cluster`'s; here are routes, who may ask, and answers that go wrong.
"""

from __future__ import annotations

import json
import re
import ssl
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from kube_cluster import Cluster, copied

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["NAMESPACE", "TOKEN", "Fault", "Server", "serving"]

NAMESPACE, TOKEN = "lab", "a-token-of-the-tests"
_JOBS = re.compile(r"/apis/batch/v1/namespaces/([^/]+)/jobs(?:/([^/]+))?")
_CORE = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|events)(?:/([^/]+))?(/log)?")


class Fault(NamedTuple):
    """What is wrong with the answer to a request whose `METHOD path?query` has `match` in it.

    status: 0: none comes, the connection is closed. after: what was asked for is done all the same. times: how often.
    """

    match: str
    status: int
    reason: str = ""
    message: str = "something went wrong"
    after: bool = False
    times: int = 1_000_000


class Server(ThreadingHTTPServer):
    """The server, on a free port of this machine."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = Cluster()
        self.tokens = {TOKEN}
        self.by_certificate = False
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.wrong: list[BaseException | None] = []
        self.ending = False
        self.silent = False
        """Watches begin, report nothing and last for ever, as behind a proxy that buffers answers."""
        self.garbage: bytes | None = None
        """All that watches report before they end."""
        self.delay = 0.0
        """Seconds that each answer takes."""
        self._open: set[socket.socket] = set()
        self._scheme = "http"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            self._scheme = "https"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_address[1]}"

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        """A kubeconfig of JSON for it."""
        file = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": TOKEN}}],
        }
        path.write_text(json.dumps(file))
        return path

    def fault(self, asked: str) -> Fault | None:
        with self.cluster.changed:
            for at, fault in enumerate(self.faults):
                if fault.match in asked:
                    if fault.times > 1:
                        self.faults[at] = fault._replace(times=fault.times - 1)
                    else:
                        del self.faults[at]
                    return fault
        return None

    def drop(self) -> None:
        """Close all connections, in the middle of their answers."""
        with self.cluster.changed:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(2)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.cluster.changed:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.cluster.changed:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        exc = sys.exception()
        if not isinstance(exc, OSError):  # clients that are killed close in the middle
            self.wrong.append(exc)


class _Denied(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        asked = f"{self.command} {self.path}"
        self.server.requests.append(asked)
        fault = self.server.fault(asked)
        time.sleep(self.server.delay)
        try:
            if fault is not None and not fault.after:
                raise _Denied(fault.status, fault.reason, fault.message)
            self._check()
            found = self._route(json.loads(body) if body else {})
            if fault is not None:
                raise _Denied(fault.status, fault.reason, fault.message)
            if found is not None:
                self._say(200, found)
        except _Denied as exc:
            if exc.status == 0:
                self.close_connection = True
                return
            self._say(exc.status, _status(exc.status, exc.reason, exc.message))

    def _say(self, status: int, found: dict[str, Any] | bytes) -> None:
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(data)

    def _check(self) -> None:
        if self.server.by_certificate and isinstance(self.request, ssl.SSLSocket) and self.request.getpeercert():
            return
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.server.tokens:
            raise _Denied(401, "Unauthorized", "Unauthorized")

    def _route(self, body: dict[str, Any]) -> dict[str, Any] | bytes | None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        jobs, core = _JOBS.fullmatch(parts.path), _CORE.fullmatch(parts.path)
        cluster = self.server.cluster
        with cluster.changed:
            if jobs is not None:
                return copied(self._jobs(jobs[1], jobs[2], body, query))
            if core is None:
                raise _Denied(404, "", "404 page not found")
            if core[2] == "events":
                about = dict(one.split("=") for one in query["fieldSelector"].split(","))
                wanted = about["involvedObject.kind"], about["involvedObject.name"]
                found = [event for event in cluster.events if tuple(event["involvedObject"].values()) == wanted]
                return {"items": found}
            if core[3] is not None:
                return copied(self._pod(core[3], core[4] is not None, body, query))
            wants = _wants(query)
            if "watch" not in query:
                found = [copied(pod) for pod in cluster.pods.values() if wants(pod)]
                return {"metadata": {"resourceVersion": str(cluster.version)}, "items": found}
        self._watch(int(query["resourceVersion"]), float(query["timeoutSeconds"]), wants)
        return None

    def _jobs(
        self, namespace: str, name: str | None, body: dict[str, Any], query: dict[str, str]
    ) -> dict[str, Any] | None:
        jobs = self.server.cluster.jobs
        if self.command == "POST":
            if namespace != NAMESPACE:
                raise _Denied(404, "NotFound", f'namespaces "{namespace}" not found')
            name = body["metadata"]["name"]
            if name in jobs:
                raise _Denied(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
            return self.server.cluster.create(body)
        if name is None:
            wants = _wants(query)
            return {"items": [job for job in jobs.values() if wants(job)]}
        if name not in jobs:
            raise _Denied(404, "NotFound", f'jobs.batch "{name}" not found')
        if self.command == "DELETE":
            assert body["propagationPolicy"] == "Foreground"
            return self.server.cluster.delete_job(name)
        return jobs[name]

    def _pod(self, name: str, log: bool, body: dict[str, Any], query: dict[str, str]) -> dict[str, Any] | bytes:
        cluster = self.server.cluster
        if name not in cluster.pods:
            raise _Denied(404, "NotFound", f'pods "{name}" not found')
        if self.command == "DELETE":
            return cluster.delete_pod(name, body["gracePeriodSeconds"])
        if log:
            return b"".join(cluster.log(name).splitlines(keepends=True)[-int(query["tailLines"]) :])
        return cluster.pods[name]

    def _watch(self, version: int, seconds: float, wants: Callable[[dict[str, Any]], bool]) -> None:
        cluster, deadline = self.server.cluster, time.monotonic() + seconds
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while self.server.silent and not self.server.ending:
            time.sleep(0.05)
        if self.server.garbage is not None:
            self.wfile.write(b"%x\r\n%b\n\r\n0\r\n\r\n" % (len(self.server.garbage) + 1, self.server.garbage))
            return
        while (left := deadline - time.monotonic()) > 0 and not self.server.ending:
            with cluster.changed:
                if version < cluster.compacted:
                    old = _status(410, "Expired", f"too old resource version: {version}")
                    self._chunk({"type": "ERROR", "object": old})
                    break
                news = [one for one in cluster.history if one[0] > version]
                if not news:
                    cluster.changed.wait(min(left, 0.5))
            for number, what, pod in news:
                version = number
                if wants(pod):
                    self._chunk({"type": what, "object": pod})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        data = json.dumps(event, ensure_ascii=False).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def _wants(query: dict[str, str]) -> Callable[[dict[str, Any]], bool]:
    wanted = [one.split("=") for one in query.get("labelSelector", "").split(",") if one]
    return lambda found: all(found["metadata"].get("labels", {}).get(name) == value for name, value in wanted)


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server that answers during the block; nothing of its pods is there after it."""
    with Server(tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ending = True
            server.drop()
            server.shutdown()
            thread.join()
            server.cluster.close()
        assert server.wrong == []
