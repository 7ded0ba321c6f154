"""Run every command of a page in an empty folder, and hold what they print against the page.

    .venv/bin/python tools/run_doc_commands.py docs/calibration.md

Blocks marked `bash` and `python` are run as they stand, from top to bottom, with this environment's
`lydite` first on the path. A line with the comment "press Ctrl-C" is interrupted after some
seconds. A plain block after commands is what they print: each of its lines has to come. Ends with
status 1 when a command fails, or a line does not come.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CUT = "press Ctrl-C"
BEFORE = 8.0  # seconds until a command is interrupted
LONGEST = 900.0
FAILED = re.compile(r"^error: ", re.MULTILINE)  # a block that shows an error may end with one


@dataclass(frozen=True)
class Block:
    """Commands, and what the page says they print."""

    language: str
    text: str
    line: int
    shown: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(options.page.read_text()):
            print(f"--- line {block.line}\n{block.text}", flush=True)
            said, status = run(block, Path(folder))
            print(said, flush=True)
            missing = unsaid(block, said)
            if status or missing:
                failures += 1
                print(f"!!! line {block.line}: status {status}; not printed: {missing}", flush=True)
    print(f"{failures} blocks failed")
    sys.exit(bool(failures))


def unsaid(block: Block, said: str) -> list[str]:
    """Lines of the page that did not come; how far an interrupted command got may differ."""
    shown = block.shown
    if CUT in block.text:
        shown, said = (re.sub(r"\d+", "N", text) for text in (shown, said))
    return [line for line in shown.splitlines() if line.strip() not in said]


def blocks(page: str) -> list[Block]:
    """Blocks of commands, each with the plain block that follows it."""
    found = list(FENCE.finditer(page))
    result: list[Block] = []
    for block, after in zip(found, [*found[1:], None], strict=True):
        language, text = block.groups()
        plain = after is not None and not after.group(1)
        shown = after.group(2) if after is not None and plain else ""
        if language in ("bash", "python"):
            line = page[: block.start()].count("\n") + 1
            result.append(Block(language, text, line, "" if FAILED.search(shown) else shown))
    return result


def run(block: Block, folder: Path) -> tuple[str, int]:
    """What a block prints, and the first status that is not 0."""
    if block.language == "python":
        return command([sys.executable, "-c", block.text], folder)
    pieces = re.split(rf"^(.*{CUT}.*)$", block.text, flags=re.MULTILINE)
    said, statuses = "", list[int]()
    for piece in pieces:
        if not piece.strip():
            continue
        more, status = command(["bash", "-ec", piece], folder, cut=CUT in piece)
        said, statuses = said + more, [*statuses, status]
    return said, next(filter(None, statuses), 0)


def command(words: list[str], folder: Path, *, cut: bool = False) -> tuple[str, int]:
    """Run one; an interrupted one is right to end with 130."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PATH": path}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=BEFORE if cut else LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT if cut else signal.SIGKILL)
        said, _ = process.communicate()
    return said, 0 if cut and process.returncode in (130, -signal.SIGINT) else process.returncode


if __name__ == "__main__":
    main()
