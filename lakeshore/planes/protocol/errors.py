"""Errors as the HTTP protocol carries them: `{error: {type, message, ...}}` and the status of the response."""

from __future__ import annotations

from typing import Any, cast

from ...errors import (
    ClaimLost,
    DispatchError,
    InvocationNotFound,
    LakeshoreError,
    NotAuthorized,
    PlaneUnavailable,
    WireError,
)

__all__ = ["ForbiddenRequest", "TooLarge", "decode_error", "encode_error", "status_of"]


class TooLarge(DispatchError):
    """One item, or one answer, that is larger than the other end accepts: a retry does not help."""


class ForbiddenRequest(DispatchError):
    """A request that no token allows: from a page of another origin, or to a host name that the server does not have.

    Its `error.type` on the wire is "Refused".
    """


def status_of(exc: Exception) -> int:
    """The status of a response that carries `exc`."""
    if isinstance(exc, InvocationNotFound):
        return 404
    if isinstance(exc, ClaimLost):
        return 409
    if isinstance(exc, TooLarge):
        return 413
    if isinstance(exc, (NotAuthorized, ForbiddenRequest)):
        return 403
    if isinstance(exc, PlaneUnavailable):
        return 503
    if isinstance(exc, ValueError):
        return 400
    return 500


def encode_error(exc: Exception) -> dict[str, Any]:
    """The fields of an error response, or of one failed item of a batch.

    An exception that is not one of ours is named by its class only: its text may hold what the client must not see.
    """
    if isinstance(exc, ClaimLost):
        return {"error": {"type": "ClaimLost", "message": str(exc), "id": exc.id, "reason": exc.reason}}
    if isinstance(exc, InvocationNotFound):
        return {"error": {"type": "InvocationNotFound", "message": str(exc), "id": exc.id}}
    if isinstance(exc, ForbiddenRequest):
        return {"error": {"type": "Refused", "message": str(exc)}}
    if isinstance(exc, (LakeshoreError, ValueError)):
        return {"error": {"type": type(exc).__name__, "message": str(exc)}}
    return {"error": {"type": "ServerError", "message": f"the server failed with {type(exc).__name__}; see its log"}}


def decode_error(error: object, status: int, where: str, id: str = "") -> Exception:
    """The exception that an error of the server becomes in the client.

    error: the field `error` of the response or the item, of any shape. where: route and request id, for the sentence.
    id: the invocation that the request named, used where the error names none.
    """
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    kind = str(fields.get("type") or "")
    message = str(fields.get("message") or f"status {status}")
    invocation = str(fields.get("id") or id)
    if kind == "InvocationNotFound":
        return InvocationNotFound(invocation)
    if kind == "ClaimLost" or status == 409:
        return ClaimLost(invocation, str(fields.get("reason") or message))
    sentence = f"{message} ({where})"
    if kind == "TooLarge" or status == 413:
        return TooLarge(sentence)
    if status == 401:
        return NotAuthorized(f"{sentence}: it is given with LAKESHORE_CLIENT_TOKEN, --token-file or token=")
    if status == 403:
        return NotAuthorized(sentence)
    if kind == "PlaneUnavailable" or status in (429, 502, 503, 504):
        return PlaneUnavailable(sentence)
    if kind == "WireError":
        return WireError(sentence)
    if kind == "ValueError":
        return ValueError(sentence)
    return DispatchError(f"{kind or 'the server'}: {sentence}")
