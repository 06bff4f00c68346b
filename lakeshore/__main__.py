"""`python -m dreamlake.lakeshore ...`: the command line where no script is on the PATH."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main()
