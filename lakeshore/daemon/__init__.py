"""`python -m dreamlake.lakeshore.daemon` is `lakeshore worker start`."""

from __future__ import annotations
