"""Requests to the API server of a Kubernetes cluster, and what its answers mean."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import anyio
import httpx

from ...errors import DispatchError
from .json_fields import entries, meta, part

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from .config import Cluster

__all__ = ["REFUSED_S", "Api", "Away", "Rejected", "check_client", "insist"]

T = TypeVar("T")

CONNECT_S, ANSWER_S = 5.0, 15.0
SILENCE_S = 10.0
"""Seconds that a watch may last longer than the server was told, which some that stand between let it do for ever."""
REFUSED_S = 10.0
"""Seconds for which a refusal of credentials may be one of a server that starts, or of a token that is being renewed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a request is made again: at first, and the most they grow to."""
MOST_SAID = 2000
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_FORGET = {"kind": "DeleteOptions", "apiVersion": "v1"}


class Away(DispatchError):
    """The API server has not answered, or not now. `pause`: seconds after which it wants to be asked again."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class Rejected(DispatchError):
    """The API server says no. `status` is HTTP's, `reason` its own word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Api:
    """The requests of one event loop, in one namespace. Each is made once: see `insist`.

    They raise Away when there is no answer, or one that may be another later, and Rejected when it is no.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.namespace, self._cluster = namespace, cluster
        self._client = httpx.AsyncClient(
            verify=False if cluster.tls is None else cluster.tls,
            proxy=cluster.proxy,
            limits=httpx.Limits(max_connections=None),
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    # Jobs and pods

    async def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json("POST", self._jobs(), body=manifest)

    async def job(self, name: str) -> dict[str, Any] | None:
        """The Job of that name; None: there is none."""
        return await _or_none(self._json("GET", self._jobs(name)))

    async def jobs(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        found = await self._json("GET", self._jobs(), {"labelSelector": selector(labels)})
        return entries(found.get("items"))

    async def delete_job(self, name: str) -> bool:
        """Have a Job deleted once its pods are gone, which get their grace for that; whether it was there."""
        how = {**_FORGET, "propagationPolicy": "Foreground"}
        return await _or_none(self._json("DELETE", self._jobs(name), body=how)) is not None

    async def pods(self, labels: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """The pods with these labels, and the version of the list, from which to `watch`."""
        found = await self._json("GET", self._core("pods"), {"labelSelector": selector(labels)})
        return entries(found.get("items")), meta(found, "resourceVersion")

    async def delete_pod(self, name: str, grace: int) -> bool:
        """Have a pod end after `grace` seconds; with 0 its name is free at once. Whether it was there."""
        how = {**_FORGET, "gracePeriodSeconds": grace}
        return await _or_none(self._json("DELETE", self._core("pods", name), body=how)) is not None

    async def log(self, pod: str, container: str, most: int) -> str:
        """The end of what a container wrote, at most so many bytes; "" where there is nothing to be had."""
        query, end = {"container": container, "tailLines": "400"}, bytearray()  # of lines that may be of any length

        def take(data: bytes) -> None:
            end.extend(data[-most:])
            del end[:-most]

        try:
            with anyio.fail_after(2 * ANSWER_S):
                await self._read_on(self._core("pods", pod, "log"), query, ANSWER_S, take)
        except TimeoutError as exc:
            raise self._away(exc) from exc
        except Rejected:
            return ""
        return end.decode("utf-8", "replace").strip()

    async def warnings(self, kind: str, name: str) -> list[tuple[str, str]]:
        """What the cluster warns of about an object: reason and message, the latest last; nothing where it may not be
        seen by this worker."""
        fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        try:
            said = await self._json("GET", self._core("events"), {"fieldSelector": fields})
        except Rejected:
            return []
        found = entries(said.get("items"))
        found.sort(key=_when)
        return [(str(one.get("reason") or ""), str(one.get("message") or "")) for one in found]

    async def watch_pods(
        self,
        labels: Mapping[str, str],
        version: str,
        seconds: float,
        take: Callable[[str, dict[str, Any]], None],
        begun: Callable[[], None],
    ) -> None:
        """Call `begun()`, and `take(what, object)` for what happens after `version`, until the server ends it, after
        `seconds` or so.

        Raises as other requests do, when it begins and while it lasts; 410 says that `version` is too old.
        """
        query = {
            "labelSelector": selector(labels),
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(seconds) + 1),
        }
        rest = b""

        def read(data: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line, take)

        with anyio.move_on_after(seconds + SILENCE_S):
            await self._read_on(self._core("pods"), query, seconds + SILENCE_S, read, begun)

    async def _read_on(
        self,
        path: str,
        query: Mapping[str, str],
        seconds: float,
        take: Callable[[bytes], None],
        begun: Callable[[], None] | None = None,
    ) -> None:
        """Call `take` with the bytes of an answer as they come. seconds: without any, after which it is given up."""
        timeout = httpx.Timeout(seconds, connect=CONNECT_S, pool=None)
        faults = list[Exception]()
        try:
            response = await self._client.send(self._request("GET", path, query, None, timeout), stream=True)
            try:
                if response.status_code != 200:
                    await response.aread()
                    raise self._error(response)
                if begun is not None:
                    begun()
                async for data in response.aiter_bytes():
                    try:
                        take(data)
                    except Exception as exc:
                        faults.append(exc)
                        await response.aclose()  # ends the loop from inside: who leaves it leaves generators open
            finally:
                await response.aclose()
        except (httpx.TransportError, httpx.StreamError, httpx.DecodingError, RuntimeError, OSError) as exc:
            if isinstance(exc, DispatchError):
                raise
            if not faults:
                raise self._away(exc) from exc
        if faults:
            raise faults[0]

    def _take(self, line: bytes, take: Callable[[str, dict[str, Any]], None]) -> None:
        if not line.strip():
            return
        event = _read(line)
        found = part(event, "object")
        if event.get("type") == "ERROR":
            raise _said(int(found.get("code") or 500), found, self._cluster.url)
        take(str(event.get("type")), found)

    # Requests

    def _jobs(self, name: str | None = None) -> str:
        below = "" if name is None else f"/{quote(name, safe='')}"
        return f"/apis/batch/v1/namespaces/{quote(self.namespace, safe='')}/jobs{below}"

    def _core(self, *names: str) -> str:
        return "/".join(
            [f"/api/v1/namespaces/{quote(self.namespace, safe='')}", *(quote(name, safe="") for name in names)]
        )

    async def _json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return _read((await self._send(method, path, query, body, ANSWER_S)).content)

    async def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Mapping[str, Any] | None, seconds: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=CONNECT_S, pool=None)
        try:
            with anyio.fail_after(2 * seconds):  # httpx counts the time without a byte
                response = await self._client.send(self._request(method, path, query, body, timeout))
        except (httpx.TransportError, httpx.DecodingError, RuntimeError, OSError) as exc:
            if isinstance(exc, DispatchError):
                raise
            raise self._away(exc) from exc
        if not 200 <= response.status_code < 300:
            raise self._error(response)
        return response

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        timeout: httpx.Timeout,
    ) -> httpx.Request:
        headers = {"accept": "application/json"}
        try:
            token = self._cluster.token()
        except DispatchError as exc:
            raise Away(str(exc)) from exc  # who renews a file may be in the middle of it
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        extensions = {} if self._cluster.server_name is None else {"sni_hostname": self._cluster.server_name}
        return self._client.build_request(
            method,
            self._cluster.url + path,
            params=query,
            json=body,
            headers=headers,
            timeout=timeout,
            extensions=extensions,
        )

    def _away(self, exc: Exception) -> DispatchError:
        """What it means that a request had no answer."""
        causes, cause = list[BaseException](), exc.__cause__
        while cause is not None:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        texts = [str(one) for one in (exc, *causes)]  # on trio the outer ones say nothing
        said = next((text for text in texts if text), "")
        what = f": {type(exc).__name__}: {said}"
        if isinstance(exc, (httpx.TimeoutException, TimeoutError)):  # whose own words are those of the event loop
            what = f" in time ({type(exc).__name__})"
        text = f"the API server {self._cluster.url} has not answered{what}"
        if any(isinstance(one, ssl.SSLCertVerificationError) for one in causes):
            return Rejected(0, "Certificate", text)
        return Away(text)

    def _error(self, response: httpx.Response) -> DispatchError:
        try:
            fields = _read(response.content)
        except Away:
            fields = dict[str, Any]()
        pause = response.headers.get("retry-after", "")
        return _said(response.status_code, fields, self._cluster.url, float(pause) if pause.isdecimal() else 0.0)


def _said(status: int, fields: Mapping[str, Any], url: str, pause: float = 0.0) -> DispatchError:
    """What a Status means: that it may go better later, or not."""
    reason = str(fields.get("reason") or "")
    message = str(fields.get("message") or "it gave no reason")[:MOST_SAID]
    text = f"the API server {url} says: {message} (status {status}{f' {reason}' if reason else ''})"
    if status in _LATER or status > 504 or (status == 409 and reason != "AlreadyExists"):
        return Away(text, pause)
    if status == 401:
        text += "; it does not take the credentials that this worker has"
    return Rejected(status, reason, text)


async def insist(fn: Callable[[], Awaitable[T]], patience: float | None = None) -> T:
    """Await `fn()` again and again while the API server is away; for `patience` seconds at least, None: for ever. While it
    does not take the credentials (401) too, for REFUSED_S at most.

    Raises what it raised last. May be cancelled between two.
    """
    began, pause = anyio.current_time(), FIRST_PAUSE
    while True:
        try:
            return await fn()
        except Away as exc:
            if patience is not None and anyio.current_time() - began > patience:
                raise
            wait = max(pause, min(exc.pause, LONGEST_PAUSE))
        except Rejected as exc:
            most = REFUSED_S if patience is None else min(REFUSED_S, patience)
            if exc.status != 401 or anyio.current_time() - began > most:
                raise
            wait = pause
        await anyio.sleep(wait)
        pause = min(pause * 2, LONGEST_PAUSE)


def check_client(cluster: Cluster) -> None:
    """Raises ValueError where no requests can be made to that URL, or through that proxy."""
    proxy = "" if cluster.proxy is None else f" through a proxy of the kind {cluster.proxy.partition(':')[0]}"
    try:
        if urlsplit(cluster.url).port == 0 or not httpx.URL(cluster.url).host:
            raise ValueError("expected https://HOST:PORT")
        Api(cluster, cluster.namespace)
    except ImportError:
        raise ValueError(
            f"{cluster.url} cannot be asked{proxy}: that needs socksio, `pip install 'httpx[socks]'`, or a proxy-url that "
            "begins with http://"
        ) from None
    except (httpx.InvalidURL, ValueError) as exc:
        raise ValueError(f"{cluster.url} cannot be asked{proxy}: {exc}") from None


def selector(labels: Mapping[str, str]) -> str:
    """Labels as a query asks for them."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


async def _or_none(answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return await answer
    except Rejected as exc:
        if exc.status != 404:
            raise
        return None


def _read(data: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise Away(f"expected JSON of the API server, got something else: {exc}") from None
    return part(found)


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
