"""Real runs of `lydite calibrate run`, killed at random times and resumed until they are complete.

    .venv/bin/python benchmarks/calibrate_kills.py                 200 kills, ten minutes or more
    .venv/bin/python benchmarks/calibrate_kills.py --kills 20

The model is tiny and untrained. Just before each SIGKILL the index is read: what it names then must
be there afterwards, with the same content, and `verify` must find no damage. Every other set is
made by two workers. Each set that becomes complete must have the content hash of one that was never
interrupted. The script ends at the first loss.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lydite.calibrate.steady import preload_steady

preload_steady()  # before MLX

from lydite.calibrate.setfile import NAME as SET  # noqa: E402
from lydite.calibrate.store import CalibrationSet  # noqa: E402
from lydite.calibrate.verify import verify  # noqa: E402
from lydite.core.errors import CalibrationError  # noqa: E402
from lydite.pipelines.untrained import make_untrained  # noqa: E402

LYDITE = [sys.executable, "-m", "lydite", "calibrate"]
SMALL = ["--steps", "3", "--size", "32x32", "--text-length", "4", "--quiet"]
LONGEST = 4.0  # seconds from the start of a run to its kill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--images", type=int, default=24, help="of a set")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        model = make_untrained(Path(place, "model"))
        prompts = Path(place, "prompts.txt")
        prompts.write_text("a red star\na fox in snow\n")
        words = [*LYDITE, "run", "-m", str(model), "--prompts", str(prompts), *SMALL]
        words += ["--images", str(options.images), "--out"]
        subprocess.run([*words, f"{place}/whole"], check=True)
        whole = content(Path(place, "whole"))
        kills = kept = complete = 0
        folder = Path(place, "set-0")
        while kills < options.kills:
            workers = ["--workers", str(1 + complete % 2)]
            held = killed(folder, [*words, str(folder), *workers], draw.uniform(0, LONGEST))
            if held is None:  # it was faster than the kill
                assert content(folder) == whole, "another content than that of an unbroken run"
                complete += 1
                folder = Path(place, f"set-{complete}")
                continue
            kills, kept = kills + 1, kept + len(held)
            check_kept(folder, held)
        subprocess.run([*words, str(folder)], check=True)
        assert content(folder) == whole, "another content than that of an unbroken run"
    print(
        f"{kills} kills: {kept} items that the index named before one, none lost, torn or changed; "
        f"{complete + 1} sets completed, each with the content of an unbroken run"
    )


def killed(folder: Path, command: list[str], seconds: float) -> dict[str, str] | None:
    """Start a run and kill it; what its index named just before, or None when it ended first."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        assert process.wait(timeout=seconds) == 0, "a run failed"
        return None
    except subprocess.TimeoutExpired:
        held = items(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    await_workers(process.pid)
    return held


def await_workers(group: int) -> None:
    """Workers end by themselves when their run is gone."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError("a worker outlived its run")


def items(folder: Path) -> dict[str, str]:
    """Key and digest of what the index names; nothing while a set is being made."""
    try:
        with CalibrationSet.open(folder) as opened:
            return {row.key: row.digest for row in opened.rows(None)}
    except CalibrationError:
        return {}


def check_kept(folder: Path, held: dict[str, str]) -> None:
    if not (folder / SET).exists():
        assert not held
        return
    found = items(folder)
    assert held.items() <= found.items(), "an item was lost or changed"
    if found:
        verdict = verify(folder)
        assert verdict.sound, verdict.damage


def content(folder: Path) -> str:
    command = [*LYDITE, "status", str(folder), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert told["missing"] == 0, "items are missing"
    return told["content_hash"]


if __name__ == "__main__":
    main()
