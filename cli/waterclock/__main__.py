"""``waterclock``: the command."""

import os
import sys

from waterclock.app import app

SIGPIPE_STATUS = 141
"""What a shell says of a command whose reader went away."""


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
        sys.stdout.flush()
    except BrokenPipeError:
        # As in `waterclock send … | head -1`. Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(SIGPIPE_STATUS)


if __name__ == "__main__":
    main()
