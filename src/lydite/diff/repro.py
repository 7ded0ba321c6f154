"""A folder with the first wrong operation alone: its inputs, both results, and a short script."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.outputs import check_output, write_output

SCRIPT = '''"""{name}: {what}."""

from pathlib import Path

import numpy as np

values = {{path.stem: np.load(path) for path in Path(__file__).parent.glob("*.npy")}}
# {listed}


def operation(values):
    return values["port"]  # replace this by the port's own code


expected = values["expected"]
error = np.linalg.norm(operation(values) - expected) / np.linalg.norm(expected)
print(f"error {{error:.2e}}; rounding alone would give about {rounding:.0e}")
'''


@dataclass(frozen=True)
class Reproduction:
    """The first wrong value, and what it is computed from."""

    name: str
    cause: str
    expected: NDArray[Any]
    port: NDArray[Any]
    rounding: float
    inputs: Mapping[str, NDArray[Any]]  # of the reference

    def write(self, folder: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
        """Write arrays and script; a file that exists is replaced with `overwrite` only."""
        arrays = {_file_name(name): value for name, value in self.inputs.items()}
        arrays |= {"expected": self.expected, "port": self.port}
        shapes = {name: "×".join(map(str, value.shape)) or "1" for name, value in arrays.items()}
        script = SCRIPT.format(
            name=_plain(self.name),
            what=_plain(self.cause or "the first wrong value of the port"),
            listed="\n# ".join(f"{name}: {shape}" for name, shape in shapes.items()),
            rounding=self.rounding or 1e-7,
        )
        files = {f"{name}.npy": _as_npy(value) for name, value in arrays.items()}
        files["check.py"] = script.encode()
        paths = tuple(inputs)
        check_output(folder / "check.py", overwrite=overwrite, inputs=paths)
        for name in files:
            check_output(folder / name, overwrite=overwrite, inputs=paths)
        for name, data in files.items():
            write_output(folder / name, data, overwrite=overwrite)


def _as_npy(value: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, np.ascontiguousarray(value), allow_pickle=False)
    return buffer.getvalue()


def _file_name(name: str) -> str:
    """A name of letters, digits, dots and lines."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_.")[-80:]


def _plain(text: str) -> str:
    """Text that cannot end the script's first string."""
    return re.sub(r'[\\"]', "'", text)[:500]
