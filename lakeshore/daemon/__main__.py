"""`python -m dreamlake.lakeshore.daemon ...`: does what `lakeshore worker start ...` does, if no script is on the PATH."""

from __future__ import annotations

import sys

from ..cli.main import main

if __name__ == "__main__":
    main(["worker", "start", *sys.argv[1:]])
