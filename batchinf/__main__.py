"""`python -m batchinf` is the console script `batchinf`: `cli`, with a quick start and end of its process."""

import sys
from typing import NoReturn

from batchinf.base.process import collect_rarely, leave

collect_rarely()  # before the imports of the command line
from batchinf import cli  # noqa: E402


def main() -> NoReturn:
    try:
        cli.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            raise end from None  # Python says what it could not write
        leave(end.code or 0)


if __name__ == "__main__":
    main()
