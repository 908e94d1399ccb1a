"""How long the README's two commands take: in a fresh clone, installs included.

Adds ``demo.seconds`` and ``test.seconds`` to the results.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from run import HERE, RESULTS, render


def main() -> None:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="waterclock-clone-") as folder:
        clone = Path(folder) / "waterclock"
        subprocess.run(["git", "clone", "--quiet", str(HERE.parent), str(clone)], check=True)
        for name, target in (("demo.seconds", "demo"), ("test.seconds", "test")):
            begun = time.monotonic()
            done = subprocess.run(
                ["make", target],
                cwd=clone,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            found[name] = round(time.monotonic() - begun, 1)
            if done.returncode:
                sys.exit(f"make {target} failed:\n{done.stdout[-4000:]}")
            print(f"{name:42} {found[name]:>12,}")
    kept: dict[str, Any] = json.loads(RESULTS.read_text())
    kept["figures"] = dict(sorted((kept["figures"] | found).items()))
    render(kept)


if __name__ == "__main__":
    main()
