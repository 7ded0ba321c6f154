"""What the reference is asked to record, and the process of its own in which it does so.

torch stays out of the caller: in bfloat16 it dies of an illegal instruction on some CPUs, unless a
variable is set before it starts.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Literal, get_args

import msgspec

from lydite.core.errors import LyditeError
from lydite.core.request import Request
from lydite.trace.writer import BUDGET, Level

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
INSTALL = "pip install 'lydite[reference]' adds what a comparison needs."

SETTINGS = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # oneDNN takes some CPUs for having more than that
    "HF_HUB_OFFLINE": "1",  # the model is on this machine already
}


class ReferenceMissing(LyditeError):
    """The reference extra is not installed, or what is installed does not start."""


class ReferenceFailed(LyditeError):
    """The reference was started and could not finish."""


class TraceOutput(msgspec.Struct, frozen=True):
    """One trace: where it goes, and the precision it is recorded in."""

    folder: str
    dtype: Dtype = "float32"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of one checkpoint, recorded once for each of `outputs`."""

    family: str
    model: str  # path of a diffusers folder, or of a single file
    request: Request  # completed by `Pipeline.plan`
    seed: int
    outputs: tuple[TraceOutput, ...]
    prediction: str = "flow"  # type of the network's prediction
    components: str | None = None  # a folder with what a single file lacks
    image: bytes | None = None  # a PNG file at the size of the picture: img2img
    mask: bytes | None = None  # a PNG file of the same size: inpainting
    noise: str | None = None  # a .npy file, (1, C, h, w), instead of the seed's
    name: str | None = None  # what the trace calls the model
    model_hash: str | None = None
    level: Level = "full"
    points: tuple[str, ...] = ("*",)
    budget: int = BUDGET
    inject: str | None = None  # folder of a trace whose values replace the run's own
    inject_at: str = ""  # patterns, with commas between them

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything that decides the run, by the names of the trace format."""
        known = self.request.conditions(seed=self.seed, model=self.name or self.model)
        more = {"noise": "given"} if self.noise else {}
        if self.model_hash:
            more["checkpoint"] = self.model_hash
        return {**known, **more}


class Reply(msgspec.Struct, omit_defaults=True):
    """One line from the other process: a step is done, or why there is nothing more to come."""

    error: str | None = None
    missing: bool = False  # of the error: something is not installed


def run_job(job: Job, on_step: Callable[[], None] = lambda: None) -> None:
    """Run a job in a process of its own, calling `on_step` at each finished step of each run."""
    check_installed()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            # -P: a torch.py in the current folder is not torch
            [sys.executable, "-P", "-m", "lydite.reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(os.environ),
        )
        try:
            assert process.stdin and process.stdout
            _send(process.stdin, msgspec.json.encode(job))
            last = _follow(process.stdout, on_step)
            status = process.wait()
        finally:  # an interrupt: the other process ends too
            if process.poll() is None:
                process.terminate()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        if status or last.error:
            errors.seek(0)
            raise _failure(last, status, errors.read().decode(errors="replace"))


def check_installed() -> None:
    """ReferenceMissing when something the reference needs is not there; nothing is imported."""
    for name in ("torch", "diffusers", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ReferenceMissing(f"{name} is not installed; {INSTALL}")


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The variables the other process starts with; what the user has set stays."""
    return {**SETTINGS, **outer}


def _send(pipe: IO[bytes], data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.close()
    except BrokenPipeError:  # it ended before it read: its status says why
        pass


def _follow(lines: Iterable[bytes], on_step: Callable[[], None]) -> Reply:
    reply = Reply()
    for line in lines:
        reply = msgspec.json.decode(line, type=Reply)
        if reply.error is None:
            on_step()
    return reply


def _failure(last: Reply, status: int, errors: str) -> LyditeError:
    if last.error is not None:
        return (ReferenceMissing if last.missing else ReferenceFailed)(last.error)
    if status == 130:
        return ReferenceFailed("the reference was interrupted.")
    if status < 0:
        name = signal.Signals(-status).name
        hints = {"SIGKILL": "was memory short?", "SIGILL": "torch does not suit this CPU."}
        return ReferenceFailed(
            f"the reference's process died of {name}; {hints.get(name, 'torch crashed.')}"
        )
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    return ReferenceFailed(f"the reference ended with status {status}: {(said or ['?'])[-1]:.300}")
