"""A Ray run that loses a worker and gains a machine: the set completes and is identical.

    .venv/bin/python benchmarks/calibrate_ray_faults.py      a minute or two; needs the extra ray

A cluster of one machine with one core is started here. While `lydite calibrate run --ray` draws on
it, a second machine with one core is added, and a worker is killed with SIGKILL in the middle of
its image. The content hash is held against that of a set made in one process without Ray.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = ("a large red star above a small blue ring", "a green square", "two yellow circles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        prompts.write_text("\n".join(PROMPTS))
        words = ["--prompts", str(prompts), "--images", str(options.images)]
        words += ["--steps", str(options.steps), "--quiet", "--out"]
        subprocess.run([*LYDITE, "run", *words, f"{folder}/plain"], check=True)
        on_a_cluster([*LYDITE, "run", *words, f"{folder}/ray"], Path(folder, "ray"))
        told = {name: status(Path(folder, name)) for name in ("plain", "ray")}
    for name, found in told.items():
        print(f"{name}: {found['images_complete']} images complete, {found['content_hash']}")
    assert told["plain"]["content_hash"] == told["ray"]["content_hash"], "the sets differ"
    print("identical")


def on_a_cluster(command: list[str], folder: Path) -> None:
    """Run the command on a cluster that grows and is hurt meanwhile."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    memory = 100 * 2**20
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": memory}
    )
    try:
        process = subprocess.Popen([*command, "--ray", cluster.address])
        wait_for(process, lambda: shards(folder) >= 2)
        print(f"{shards(folder)} images are in; a machine is added")
        cluster.add_node(num_cpus=1, object_store_memory=memory)
        wait_for(process, lambda: len(drawing()) >= 2)
        victim = drawing()[0]
        os.kill(victim, signal.SIGKILL)
        print(f"{shards(folder)} images are in, two workers draw; worker {victim} is killed")
        assert process.wait(timeout=300) == 0, "the run failed"
    finally:
        cluster.shutdown()


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, "the run ended before it could be hurt: give more --images"
        assert time.monotonic() < deadline, "waited for three minutes"
        time.sleep(0.05)


def shards(folder: Path) -> int:
    return len(list(folder.glob("shards/*.safetensors")))


def drawing() -> list[int]:
    """The workers of Ray that run our task now, by the title they give themselves."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    rows = (line.split(None, 1) for line in listed.stdout.splitlines()[1:])
    return [int(pid) for pid, title in rows if title.startswith("ray::draw")]


def status(folder: Path) -> dict[str, Any]:
    command = [*LYDITE, "status", str(folder), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


LYDITE = [sys.executable, "-m", "lydite", "calibrate"]

if __name__ == "__main__":
    main()
