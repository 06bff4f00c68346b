"""Send requests to the API server of a Kubernetes cluster, and decide what its answers mean."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import anyio
import httpx

from ...concurrency.backoff import Backoff
from ...errors import DispatchError
from .json_fields import entries, meta, part

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from .config import Cluster

__all__ = ["UNAUTHORIZED_GRACE", "ApiUnavailable", "KubeApi", "RequestRejected", "check_client", "keep_trying"]

T = TypeVar("T")

CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 15.0
WATCH_OVERTIME = 10.0
"""Seconds that a watch may last longer than was requested, which some proxies between would let it do for ever."""
UNAUTHORIZED_GRACE = 10.0
"""Seconds for which an API server may reject credentials (401) because it starts, or because a token is being renewed."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds before a request is sent again: at first, and at most."""
MAX_MESSAGE = 2000
"""Characters of the API server's message that an error shows."""
LOG_LINES = 400
"""Lines of a log that are requested, each of any length."""
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
_DELETE_OPTIONS = {"kind": "DeleteOptions", "apiVersion": "v1"}


class ApiUnavailable(DispatchError):
    """The API server has not answered, or has failed in a way that may pass."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """`retry_after`: seconds after which the server wants the request again."""
        super().__init__(message)
        self.retry_after = retry_after


class RequestRejected(DispatchError):
    """The API server has rejected a request, and would again."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """`status` is that of HTTP, `reason` the server's own word for it."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubeApi:
    """The requests of one event loop in one namespace. Each is sent once: see `keep_trying`.

    They raise ApiUnavailable when there is no answer, or one that may be another later, and RequestRejected otherwise.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.namespace = namespace
        self._cluster = cluster
        self._token_lock = anyio.Lock()
        """Held while a token is read, so that a program which prints one runs once for all requests."""
        self._client = httpx.AsyncClient(
            verify=False if cluster.tls is None else cluster.tls,
            proxy=cluster.proxy,
            limits=httpx.Limits(max_connections=None),
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    # Jobs and pods

    async def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create a Job, and return it."""
        return await self._request_json("POST", self._jobs_path(), body=manifest)

    async def job(self, name: str) -> dict[str, Any] | None:
        """Return the Job of that name; None where there is none."""
        return await _none_if_missing(self._request_json("GET", self._jobs_path(name)))

    async def jobs(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the Jobs with these labels."""
        found = await self._request_json("GET", self._jobs_path(), {"labelSelector": _selector(labels)})
        return entries(found.get("items"))

    async def delete_job(self, name: str) -> bool:
        """Delete a Job, which goes when its pods have ended within their grace. Return whether it existed."""
        body = {**_DELETE_OPTIONS, "propagationPolicy": "Foreground"}
        return await _none_if_missing(self._request_json("DELETE", self._jobs_path(name), body=body)) is not None

    async def pods(self, labels: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """Return the pods with these labels, and the version of the list, from which `watch_pods` goes on."""
        found = await self._request_json("GET", self._core_path("pods"), {"labelSelector": _selector(labels)})
        return entries(found.get("items")), meta(found, "resourceVersion")

    async def delete_pod(self, name: str, grace: int) -> bool:
        """End a pod within `grace` seconds; with 0 it is gone at once. Return whether it existed."""
        body = {**_DELETE_OPTIONS, "gracePeriodSeconds": grace}
        path = self._core_path("pods", name)
        return await _none_if_missing(self._request_json("DELETE", path, body=body)) is not None

    async def log(self, pod: str, container: str, max_bytes: int) -> str:
        """Return the end of what a container wrote; "" where that cannot be read. Keeps no more than that in memory."""
        query = {"container": container, "tailLines": str(LOG_LINES)}
        end = bytearray()

        def take(data: bytes) -> None:
            end.extend(data[-max_bytes:])
            del end[:-max_bytes]

        try:
            with anyio.fail_after(2 * ANSWER_TIMEOUT):
                await self._stream(self._core_path("pods", pod, "log"), query, ANSWER_TIMEOUT, take)
        except TimeoutError as exc:
            raise self._no_answer(exc) from exc
        except RequestRejected:
            return ""
        return end.decode("utf-8", "replace").strip()

    async def warnings(self, kind: str, name: str) -> list[tuple[str, str]]:
        """Return reason and message of the warnings about an object, the latest last; none where they may not be read."""
        fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        try:
            answer = await self._request_json("GET", self._core_path("events"), {"fieldSelector": fields})
        except RequestRejected:
            return []
        events = sorted(entries(answer.get("items")), key=_event_time)
        return [(str(event.get("reason") or ""), str(event.get("message") or "")) for event in events]

    async def watch_pods(
        self,
        labels: Mapping[str, str],
        version: str,
        seconds: float,
        take: Callable[[str, dict[str, Any]], None],
        begun: Callable[[], None],
    ) -> None:
        """Receive the changes of pods, until the server ends the watch.

        Args:
            labels: The labels of the pods.
            version: Changes after this version are received.
            seconds: For how long the watch is requested.
            take: Called with the kind of each change and the pod.
            begun: Called when the server has accepted the watch.

        Raises:
            RequestRejected: With status 410 where the version is too old, when the watch begins or while it lasts.
        """
        query = {
            "labelSelector": _selector(labels),
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
                if line.strip():
                    self._take_change(line, take)

        with anyio.move_on_after(seconds + WATCH_OVERTIME):
            await self._stream(self._core_path("pods"), query, seconds + WATCH_OVERTIME, read, begun)

    def _take_change(self, line: bytes, take: Callable[[str, dict[str, Any]], None]) -> None:
        event = _decode(line)
        found = part(event, "object")
        if event.get("type") == "ERROR":
            raise _error_of_status(int(found.get("code") or 500), found, self._cluster.url)
        take(str(event.get("type")), found)

    # Requests

    def _jobs_path(self, name: str | None = None) -> str:
        path = f"/apis/batch/v1/namespaces/{quote(self.namespace, safe='')}/jobs"
        return path if name is None else f"{path}/{quote(name, safe='')}"

    def _core_path(self, *names: str) -> str:
        quoted = (quote(name, safe="") for name in names)
        return "/".join([f"/api/v1/namespaces/{quote(self.namespace, safe='')}", *quoted])

    async def _request_json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request, and return the object in the answer."""
        request = await self._build_request(method, path, query, body, ANSWER_TIMEOUT)
        try:
            with anyio.fail_after(2 * ANSWER_TIMEOUT):  # httpx counts only the time without a byte
                response = await self._client.send(request)
        except (httpx.TransportError, httpx.DecodingError, RuntimeError, OSError) as exc:
            if isinstance(exc, DispatchError):
                raise
            raise self._no_answer(exc) from exc
        if not 200 <= response.status_code < 300:
            raise self._error_of(response)
        return _decode(response.content)

    async def _stream(
        self,
        path: str,
        query: Mapping[str, str],
        silence: float,
        take: Callable[[bytes], None],
        begun: Callable[[], None] | None = None,
    ) -> None:
        """Send a request, and call `take` with the bytes of the answer as they arrive.

        `silence`: seconds without any after which the answer is given up.
        """
        errors = list[Exception]()
        request = await self._build_request("GET", path, query, None, silence)
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    await response.aread()
                    raise self._error_of(response)
                if begun is not None:
                    begun()
                async for data in response.aiter_bytes():
                    try:
                        take(data)
                    except Exception as exc:
                        errors.append(exc)
                        await response.aclose()  # it ends the loop; leaving the loop would leave its generator open
            finally:
                await response.aclose()
        except (httpx.TransportError, httpx.StreamError, httpx.DecodingError, RuntimeError, OSError) as exc:
            if isinstance(exc, DispatchError):
                raise
            if not errors:
                raise self._no_answer(exc) from exc
        if errors:
            raise errors[0]

    async def _build_request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        silence: float,
    ) -> httpx.Request:
        headers = {"accept": "application/json"}
        try:
            async with self._token_lock:
                token = await self._cluster.credentials.token()
        except DispatchError as exc:
            message = f"the token for {self._cluster.url} cannot be read: {exc}"
            raise ApiUnavailable(message) from exc  # it may be in the middle of being renewed
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        server_name = self._cluster.server_name
        return self._client.build_request(
            method,
            self._cluster.url + path,
            params=query,
            json=body,
            headers=headers,
            timeout=httpx.Timeout(silence, connect=CONNECT_TIMEOUT, pool=None),
            extensions={} if server_name is None else {"sni_hostname": server_name},
        )

    # Errors

    def _no_answer(self, exc: Exception) -> DispatchError:
        """Return the error for a request that got no answer."""
        causes = list[BaseException]()
        cause = exc.__cause__
        while cause is not None:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        text = next((str(error) for error in (exc, *causes) if str(error)), "")  # on trio the outer ones have no text
        how = f": {type(exc).__name__}: {text}"
        if isinstance(exc, (httpx.TimeoutException, TimeoutError)):  # whose text differs between event loops
            how = f" in time ({type(exc).__name__})"
        message = f"the API server {self._cluster.url} has not answered{how}"
        if any(isinstance(error, ssl.SSLCertVerificationError) for error in causes):
            return RequestRejected(0, "Certificate", message)
        return ApiUnavailable(message)

    def _error_of(self, response: httpx.Response) -> DispatchError:
        if response.status_code == 401:
            _, _, token = response.request.headers.get("authorization", "").partition(" ")
            self._cluster.credentials.reject(token)
        try:
            fields = _decode(response.content)
        except ApiUnavailable:
            fields = dict[str, Any]()
        retry_after = response.headers.get("retry-after", "")
        seconds = float(retry_after) if retry_after.isdecimal() else 0.0
        return _error_of_status(response.status_code, fields, self._cluster.url, seconds)


def _error_of_status(status: int, fields: Mapping[str, Any], url: str, retry_after: float = 0.0) -> DispatchError:
    """Return the error for a Status object: that the request may succeed later, or that it will not."""
    reason = str(fields.get("reason") or "")
    explanation = str(fields.get("message") or "no message")[:MAX_MESSAGE]
    status_text = f"status {status} {reason}".rstrip()
    message = f"the API server {url} answered: {explanation} ({status_text})"
    if status in _TEMPORARY or status > 504 or (status == 409 and reason != "AlreadyExists"):
        return ApiUnavailable(message, retry_after)
    if status == 401:
        message += "; it does not accept the credentials of this worker"
    return RequestRejected(status, reason, message)


async def keep_trying(fn: Callable[[], Awaitable[T]], timeout: float | None = None) -> T:
    """Await `fn()` again and again while the API server is unavailable. May be cancelled between two calls.

    It also goes on for UNAUTHORIZED_GRACE while the server rejects the credentials (401).

    Args:
        fn: Sends one request.
        timeout: Seconds, at least, until it gives up; None: never.

    Raises:
        ApiUnavailable: The last error, after `timeout`.
        RequestRejected: Whatever `fn` raised.
    """
    began = anyio.current_time()
    unauthorized = UNAUTHORIZED_GRACE if timeout is None else min(UNAUTHORIZED_GRACE, timeout)
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    while True:
        delay = 0.0
        try:
            return await fn()
        except ApiUnavailable as exc:
            if timeout is not None and anyio.current_time() - began > timeout:
                raise
            delay = min(exc.retry_after, LONGEST_PAUSE)
        except RequestRejected as exc:
            if exc.status != 401 or anyio.current_time() - began > unauthorized:
                raise
        await backoff.pause(max(delay, backoff.next_delay()))


def check_client(cluster: Cluster) -> None:
    """Raise ValueError where no requests can be sent to the cluster's URL, or through its proxy."""
    through = "" if cluster.proxy is None else f" through a proxy of the kind {cluster.proxy.partition(':')[0]}"
    try:
        if urlsplit(cluster.url).port == 0 or not httpx.URL(cluster.url).host:
            raise ValueError("expected https://HOST:PORT")
        KubeApi(cluster, cluster.namespace)
    except ImportError:
        raise ValueError(
            f"{cluster.url} cannot be reached{through}: that needs socksio, `pip install 'httpx[socks]'`, or a proxy-url "
            "that begins with http://"
        ) from None
    except (httpx.InvalidURL, ValueError) as exc:
        raise ValueError(f"{cluster.url} cannot be reached{through}: {exc}") from None


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


async def _none_if_missing(answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the answer; None where it is that there is no such object."""
    try:
        return await answer
    except RequestRejected as exc:
        if exc.status != 404:
            raise
        return None


def _decode(data: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ApiUnavailable(f"expected JSON of the API server, got something else: {exc}") from None
    return part(found)


def _event_time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
