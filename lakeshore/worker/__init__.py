"""The worker: its loop, how outcomes are delivered, and the two executors: in this process, and in child processes."""

from __future__ import annotations
