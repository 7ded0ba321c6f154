"""A run that is killed leaves a trace that opens up to its last finished line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lydite.trace.reader import Trace

RUN = """
import sys
from pathlib import Path
import numpy as np
from lydite.trace import writer as writing
from lydite.trace.events import Header

writing.SEAL_SECONDS, writing.SHARD_BYTES = 0.01, 200_000
writer = writing.TraceWriter(Path(sys.argv[1]), Header())
print("started", flush=True)
for index in range(10**9):
    value = np.full(index % 3000 + 1, index, np.float32)
    writer.add(f"layer.{index}", value, step=index // 100)
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.05, 0.11, 0.3, 0.52])
def test_kill_9_at_any_moment_leaves_every_readable_value_intact(
    tmp_path: Path, delay: float
) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
    trace = Trace.open(tmp_path / "run")
    assert not trace.header.complete
    if delay >= 0.3:
        assert len(trace.events) > 10
    for index, event in enumerate(trace.events):
        assert (event.i, event.name) == (index, f"layer.{index}")
        expected = np.full(index % 3000 + 1, index, np.float32)
        np.testing.assert_array_equal(trace.read(event), expected)


def test_a_full_disk_is_one_error_and_what_was_written_stays(tmp_path: Path) -> None:
    script = RUN.replace("range(10**9)", "range(400)").replace(
        "import numpy as np", "import numpy as np, resource, signal", 1
    )
    script = script.replace(
        "print(",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); print(",
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "could not be written" in done.stderr
    trace = Trace.open(tmp_path / "run")
    assert not trace.header.complete
    for event in trace.events:
        assert (trace.read(event) == event.i).all()
