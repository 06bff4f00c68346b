"""The child's side of a child process: its program, its folder, and a fork server.

`python -m dreamlake.lakeshore.daemon` is the same as `lakeshore worker start`.
"""

from __future__ import annotations
