"""The command line, `lakeshore`: workers, and what people look at and do about invocations."""

from __future__ import annotations
