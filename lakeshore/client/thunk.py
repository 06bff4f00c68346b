"""Thunks: a callable bundled with its arguments, to be submitted to a queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeGuard, TypeVar

from ..body.context import current_context
from ..functions.serialize import serialize_fn
from ..ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..wire import Envelope

__all__ = ["Thunk", "is_thunk", "thunk"]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, eq=False)
class Thunk(Generic[T_co]):
    """A callable with its arguments, to be submitted: `queue.submit(thunk(f, x))`."""

    fn: Callable[..., T_co]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_envelope(
        self,
        id: str | None = None,
        prefix: str | None = None,
        key: str | None = None,
        parent: str | None = None,
    ) -> Envelope:
        """Pack the callable and the arguments now, so that later changes do not show.

        Args:
            id: The invocation's id; None: a new one.
            prefix: What its keys are read below; None: the prefix of the ambient `dls.scope`.
            key: The idempotency key.
            parent: The id of the invocation that submits; None: the one that is running here, if one is.

        Returns:
            The Envelope of one invocation.

        Raises:
            TransportError: The callable cannot be sent to a worker.
            EncodeError: An argument cannot be packed.
        """
        from .envelopes import pack_thunk  # making a Thunk loads no codec

        here = current_context()
        return pack_thunk(
            self,
            serialize_fn(self.fn),
            id=new_id() if id is None else id,
            prefix=here.prefix if prefix is None else prefix,
            key=key,
            parent=here.invocation_id if parent is None else parent,
        )


def is_thunk(value: object) -> TypeGuard[Thunk[Any]]:
    """True for a Thunk; unlike `isinstance` it leaves type checkers no unknown parameter."""
    return isinstance(value, Thunk)


def thunk(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Thunk[T]:
    """Bundle a callable with its arguments, without calling it.

    Args:
        fn: Any callable, a UDF too.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(
            f"expected a callable and its arguments, got {type(fn).__name__}: write thunk(f, x), not thunk(f(x))"
        )
    return Thunk(fn, args, kwargs)
