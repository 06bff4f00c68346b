"""Every bound that two or more modules share. A bound that only one module uses stands in that module.

Sizes are bytes, times float seconds.
"""

from __future__ import annotations

__all__ = [
    "CLOCK_STEP",
    "CLOCK_STEP_GRACE",
    "DEFAULT_LEASE",
    "DEFAULT_MAX_LOST",
    "LARGE_BYTES",
    "MAX_BYTES_PER_PAGE",
    "MAX_COPIED_BYTES",
    "MAX_FRAMES_PER_PAGE",
    "MAX_FRAME_BYTES",
    "MAX_HOLD_TIME",
    "MAX_ITEMS_PER_REQUEST",
    "MAX_REQUEST_BYTES",
    "MAX_SEQ",
    "MAX_VALUE_FRAME_BYTES",
    "OUTPUT_TAIL_BYTES",
    "POLL_TIMEOUT",
]

# Operations

LARGE_BYTES = 1 << 20
"""An operation or a result of more bytes travels apart from the small ones, which would otherwise wait for its transfer."""

# The codec

MAX_COPIED_BYTES = 4096
"""Packing copies bytes up to this size. More are spliced into the output: no copy, but some work for each piece."""

# Leases

DEFAULT_LEASE = 30.0
"""How long a claim lasts unless it is renewed: a worker whose machine dies holds its work for so long."""
DEFAULT_MAX_LOST = 5
"""How many lost leases end an invocation: it may be what kills its workers."""
CLOCK_STEP = 5.0
"""A clock that moves forward by more than this beside a monotonic one was set, or its machine slept."""
CLOCK_STEP_GRACE = 60.0
"""How long no lease is judged after such a step, so that workers get the time to renew theirs first."""

# Frames and journals

MAX_FRAMES_PER_PAGE = 2000
"""Frames of one page of a journal, one append, or one step of a migration: some MiB of memory even for empty ones."""
MAX_BYTES_PER_PAGE = 16 << 20
"""Bytes of one page of a journal, or of one append; a frame that is larger comes alone."""
MAX_VALUE_FRAME_BYTES = 64 << 20
"""A value of more bytes is cut into several frames, so that each is far below what readers and requests take."""
MAX_FRAME_BYTES = 256 << 20
"""A reader raises WireError for a longer frame, unless it was given another limit: a damaged length must not fill memory."""
MAX_SEQ = 1 << 62
"""Numbers of frames, attempts and the like stay below this: databases hold signed integers of 64 bits."""

# Requests over HTTP

MAX_REQUEST_BYTES = 128 << 20
"""The body of one request; a server answers a larger one with 413, unless it was given another limit."""
MAX_ITEMS_PER_REQUEST = 10_000
"""Items of one batch request, or ids and streams of one await-many."""
POLL_TIMEOUT = 30.0
"""How long one long poll is held: fewer than three requests a minute for each caller that waits, and less than most
proxies allow."""
MAX_HOLD_TIME = 300.0
"""How long a server holds any request at most, whatever the request asks for."""

# Errors

OUTPUT_TAIL_BYTES = 4096
"""How much of the end of a program's output an error shows."""
