"""Is this Python one that Lydite runs on? It must run in older ones, before .venv is made.

python3 tools/check_python_version.py [GOAL]
"""

from __future__ import annotations

import platform
import sys

LOWEST, HIGHEST = (3, 11), (3, 14)


def reason(
    goal: str, version: tuple[int, ...], system: str, machine: str, macos: tuple[int, ...]
) -> str | None:
    """Why not, and what to do; None if it is."""
    retry = f"make {goal} PYTHON=python3.12"
    if not LOWEST <= version <= HIGHEST:
        get = "brew install python@3.12" if system == "Darwin" else "install one of these"
        return (
            f"Lydite needs Python {_dotted(LOWEST)} to {_dotted(HIGHEST)}; this is "
            f"{_dotted(version)}. First: {get}. Then: {retry}"
        )
    if system == "Darwin" and machine != "arm64":
        return (
            "This Python is for Intel, and MLX runs on Apple silicon only. On an Apple silicon Mac "
            f"install an arm64 Python (one under Rosetta is for Intel). Then: {retry}"
        )
    if system == "Darwin" and macos < (14,):
        return f"MLX needs macOS 14 or newer; this is {_dotted(macos)}."
    if system not in ("Darwin", "Linux"):
        return f"Lydite runs on macOS (Apple silicon) and Linux; this is {system}."
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def main() -> None:
    """Exit with the reason, or quietly."""
    goal = sys.argv[1] if len(sys.argv) > 1 else "demo"
    macos = tuple(int(part) for part in platform.mac_ver()[0].split(".") if part)
    sys.exit(reason(goal, sys.version_info[:2], platform.system(), platform.machine(), macos))


if __name__ == "__main__":
    main()
