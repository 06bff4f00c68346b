"""Who may use a route: what browsers may send, which role a token needs, and which namespace it opens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import NotAuthorized, WireError
from ..planes.protocol.errors import ForbiddenRequest
from .requests import ErrorAnswer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from .tokens import Caller, TokenFile

__all__ = ["Access"]

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_ACCEPTED_HOSTS = 100
"""Accepted Host headers that are kept, so that the next request with the same one is not parsed again."""
MAX_NAMESPACE_LENGTH = 200
"""Characters."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(?::[0-9]*)?")


class Access:
    """The rules of one server for its requests.

    tokens: the tokens that the server accepts. Without any, every caller may do everything in every namespace.
    allowed_hosts: names of this server, besides loopback names and the address of the connection. If there are some, a
    request must name one of them even when a token is required.
    namespace: the namespace of a request that carries no token and names no namespace.
    """

    def __init__(self, tokens: TokenFile | None, allowed_hosts: Collection[str], namespace: str) -> None:
        self._tokens = tokens
        self._hosts = LOOPBACK_HOSTS | {host.lower() for host in allowed_hosts}
        self._tokens_replace_hosts = not allowed_hosts
        self._namespace = namespace
        self._accepted_hosts: set[bytes] = set()

    def check_browser(self, headers: Mapping[bytes, bytes], scope: Mapping[str, Any]) -> None:
        """Reject a request that a web page may have sent, whatever host name led the browser here (DNS rebinding).

        Raises:
            ForbiddenRequest: the request has an Origin header, or a Host header that does not name this server.
        """
        if b"origin" in headers:
            raise ForbiddenRequest(
                "expected a request without an Origin header, got one: this server accepts no requests from web pages"
            )
        if self._tokens_replace_hosts and self._tokens is not None and self._tokens.required:
            return
        host = headers.get(b"host", b"")
        if host in self._accepted_hosts:
            return
        name = _host_name(host)
        if name in self._hosts:
            if len(self._accepted_hosts) < MAX_ACCEPTED_HOSTS:
                self._accepted_hosts.add(host)
            return
        address = scope.get("server")
        if address and name == str(address[0]).lower():
            return
        raise ForbiddenRequest(
            f"expected a Host header that names this server, got {name[:80]!r}: "
            "start the server with --allowed-host for each further name that clients use"
        )

    def authorize(self, headers: Mapping[bytes, bytes], role: str, namespace: str | None) -> str:
        """Check that the caller has the role, and the namespace if it names one.

        Returns:
            The namespace of the request.

        Raises:
            ErrorAnswer: a token is required, and there is none or an unknown one (status 401).
            NotAuthorized: the token's role is too low, or its namespace is another one.
            WireError: the namespace is not a possible name.
        """
        caller = self._authenticate(headers, role)
        if namespace is not None and not (0 < len(namespace) <= MAX_NAMESPACE_LENGTH and namespace.isprintable()):
            raise WireError(
                f"expected a namespace of 1 to {MAX_NAMESPACE_LENGTH} printable characters, got {namespace[:80]!r}"
            )
        if caller is None:
            return self._namespace if namespace is None else namespace
        if namespace is not None and namespace != caller.namespace:
            raise NotAuthorized(f"expected the namespace of the token, {caller.namespace!r}, got {namespace!r:.80}")
        return caller.namespace

    def _authenticate(self, headers: Mapping[bytes, bytes], role: str) -> Caller | None:
        """The caller that the token belongs to; None if no token is required."""
        if self._tokens is None or not self._tokens.required:
            return None
        given = headers.get(b"authorization")
        caller = self._tokens.check(None if given is None else given.decode("latin-1"))
        if caller is None:
            found = "none" if given is None else "one that is not known here"
            raise ErrorAnswer(
                401,
                "NotAuthorized",
                f"expected a token, `Authorization: Bearer ...`, got {found}",
                (b"www-authenticate", b"Bearer"),
            )
        if not caller.may(role):
            raise NotAuthorized(f"expected a token of the role {role}, got one of the role {caller.role}")
        return caller


def _host_name(value: bytes) -> str:
    """The name in a Host header, in lower case and without the port; a malformed header as it is."""
    text = value.decode("latin-1").lower()
    found = _HOST.fullmatch(text)
    return text if found is None else found[1].strip("[]")
