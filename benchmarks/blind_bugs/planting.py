"""What the ports share: the record of a bug, tiny random models, the inputs and taps of a port."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.taps import recording
from lydite.trace.writer import Capture

Array = NDArray[Any]


@dataclass(frozen=True)
class Bug:
    """One planted mistake.

    `words` are regular expressions; one of them matches the text of a finding that names the cause.
    `gate` is "weights", "ids", "schedule" or "inputs" where the mistake is one of loading, tokens,
    schedule or inputs: a verdict that names the wrong parameter or input is right as well.
    """

    name: str
    what: str
    words: tuple[str, ...]
    gate: str = ""


def randomised(make: Callable[[], Any], seed: int) -> Any:
    """A model with random weights; 0.05 * randn is added to all, so no norm is the identity."""
    torch.manual_seed(seed)
    model = make().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers in float32, the same in each precision of a run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(model: Any, folder: Path, scope: str, dtype: str) -> Any:
    """The model in `dtype`, after its float32 weights were saved below folder/model/scope."""
    if not (folder / "model" / scope).exists():
        model.save_pretrained(folder / "model" / scope)
    return model.to(getattr(torch, dtype))


def reference_trace(folder: Path, dtype: str) -> Recorder:
    """The recorder of a reference run."""
    header = Header(side="reference", dtype=dtype, device="cpu")
    return Recorder.start(folder / f"ref_{dtype}", header=header)


def checkpoint(folder: Path, scope: str) -> dict[str, Array]:
    """The saved float32 weights of a component."""
    (path,) = (folder / "model" / scope).glob("*.safetensors")
    return load_file(path)


def given(folder: Path) -> Callable[..., Array]:
    """Reads a value of the float32 reference by its name; a port starts from these."""
    trace = Trace.open(folder / "ref_float32")

    def value(name: str, slot: str = "out", step: int = 0) -> Array:
        event = trace.find(name, slot, step)
        assert event is not None, name
        return np.array(trace.read(event))

    return value


@contextmanager
def port_trace(
    out: Path, dump: str, dtype: str, blocks: tuple[str, ...], weights: Mapping[str, Any] | None
) -> Generator[Recorder]:
    """Taps inside write to `out`; of dump "blocks" only those that the patterns `blocks` name."""
    capture = Capture(points=blocks) if dump == "blocks" else None
    with recording(out, header=Header(dtype=dtype), capture=capture) as recorder:
        if weights is not None:
            recorder.writer.add_weights({k: np.asarray(v) for k, v in weights.items()})
        yield recorder


def rounder(dtype: str) -> Callable[[Any], Array]:
    """Rounds to the run's precision and keeps float32 arrays, for ports in NumPy."""
    if dtype == "float32":
        return lambda x: np.asarray(x, np.float32)
    narrow = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return lambda x: np.asarray(x, np.float32).astype(narrow).astype(np.float32)
