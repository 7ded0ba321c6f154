"""Does every extra have wheels for Apple silicon, macOS 14 and newer, Python 3.11 to 3.14?

    python tools/check_macos_wheels.py            needs uv, and a package index

Nothing is installed. A line for each Python and extra says how many packages it takes; the exit
status is 1 where one cannot be resolved from wheels alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = ((), ("reference",), ("reference", "dev"), ("ray",))
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Resolve every pair."""
    if shutil.which("uv") is None:
        sys.exit("uv is not installed; install it: pip install uv")
    failed = 0
    for python in PYTHONS:
        for extras in EXTRAS:
            name = f"Python {python}, {'+'.join(extras) or 'no extra'}"
            done = subprocess.run(
                ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header",
                 "--only-binary", ":all:", "--python-platform", "aarch64-apple-darwin",
                 "--python-version", python, *(f"--extra={extra}" for extra in extras),
                 "pyproject.toml"],
                cwd=ROOT, capture_output=True, text=True,
                env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
            )  # fmt: skip
            if done.returncode:
                failed += 1
                print(f"{name}: FAILED\n{done.stderr.strip()}")
            else:
                print(f"{name}: {len(done.stdout.splitlines())} packages, all as wheels")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
