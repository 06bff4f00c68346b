"""What httpx does for the HTTP plane: proxies, transports that the caller brings, and the certificates that TLS trusts.

Only connections that need it import this module, since httpx takes a while to load.
"""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from .pool import CONNECT_TIMEOUT, RequestFailed, Response, StreamedResponse, check_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

__all__ = ["HttpxPool", "tls_context"]

KEEPALIVE_SECONDS = 60.0
"""How long an unused connection is kept."""


class HttpxPool:
    """A `Pool` over httpx.

    httpx may lose a place among its connections when a request is cancelled while it connects (encode/httpx 1461): callers
    of a pool with a limit let their requests run to the end.
    """

    def __init__(self, base: str, limit: int | None, transport: httpx.AsyncBaseTransport | None) -> None:
        """
        Args:
            base: Scheme, host and port of the server as the beginning of a URL.
            limit: Most requests at a time; None: no limit.
            transport: What sends the requests; None: httpx's own, which follows the environment's proxies.
        """
        limits = httpx.Limits(
            max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=KEEPALIVE_SECONDS
        )
        self._base = base
        self._client = httpx.AsyncClient(limits=limits, transport=transport, follow_redirects=False)

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Response:
        request = self._client.build_request(
            method,
            self._base + target,
            content=body or None,
            headers=dict(headers),
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT, pool=None),
        )
        try:
            response = await self._client.send(request)
        except httpx.ConnectError as exc:
            raise RequestFailed(f"no connection: {exc}") from exc
        except (httpx.TransportError, RuntimeError) as exc:  # RuntimeError: the client was closed meanwhile
            raise RequestFailed(f"{type(exc).__name__}: {exc}") from exc
        check_request_id(headers, response.headers)
        return Response(response.status_code, response.headers, response.content)

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[StreamedResponse, None]:
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        request = self._client.build_request(method, self._base + target, headers=dict(headers), timeout=timeout)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.TransportError, RuntimeError) as exc:
            raise RequestFailed(f"{type(exc).__name__}: {exc}") from exc
        pieces = response.aiter_raw()

        async def next_piece() -> bytes | None:
            try:
                return await anext(pieces, None)
            except (httpx.TransportError, httpx.StreamError) as exc:
                raise RequestFailed(f"{type(exc).__name__}: {exc}") from exc

        try:
            yield StreamedResponse(response.status_code, response.headers, next_piece)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()


def tls_context() -> ssl.SSLContext:
    """Whom a TLS connection trusts: SSL_CERT_FILE or SSL_CERT_DIR, else the certificates that come with httpx."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    # A body without a length ends with the connection. Without this a connection that somebody cut looks the same.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    return context
