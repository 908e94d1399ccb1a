"""Prints what the distributions in the given folders need of others, one requirement a line.

The image installs these first, so that a change of our own code leaves that layer as it is.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Arguments are folders with a ``pyproject.toml``."""
    needed = {
        requirement
        for folder in sys.argv[1:]
        for requirement in tomllib.loads(Path(folder, "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
    }
    for requirement in sorted(needed):
        if not requirement.startswith("waterclock-"):
            print(requirement)


if __name__ == "__main__":
    main()
