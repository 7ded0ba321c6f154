"""quantization.json of an export: what it was made from and how, and the proof that data was used.

The proof is in two parts: for each layer the share of its integers that rounding to nearest would
not have given, and for each reconstructed unit its error on held-out rows before and after.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lydite.core.config import read_json
from lydite.core.errors import FileError, at
from lydite.core.files import size_text

NAME = "quantization.json"
MOST_LAYERS = 100_000
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Error = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[int, Meta(ge=1)]


class UnitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The relative error of a unit's outputs on held-out rows: rounded to nearest, and at last."""

    path: Text
    nearest: Error
    after: Error


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one export was made."""

    lydite: Text  # versions
    mlx: Text
    source_model: Text  # a name for people
    source_hash: Hash
    set_hash: Hash | None  # of the calibration set's content; None: no data was used
    method: Annotated[str, Meta(pattern=r"^[\w +.-]{1,80}$")]
    settings: dict[str, Any]
    bits_per_weight: Annotated[float, Meta(gt=0, le=32)]  # of the quantized layers
    bytes_before: Bytes  # of the network's weights
    bytes_after: Bytes
    changed: Annotated[dict[Text, Share], Meta(min_length=1, max_length=MOST_LAYERS)]
    """Of each quantized layer: the share of integers that differ from rounding to nearest."""
    units: Annotated[list[UnitError], Meta(max_length=MOST_LAYERS)]
    activations: Literal["simulated", "mx.qqmm"] | None
    seed: int

    @property
    def improved(self) -> int:
        """How many units have a smaller error than rounded to nearest."""
        return sum(unit.after < unit.nearest for unit in self.units)

    @property
    def method_text(self) -> str:
        """The method, and how inputs are rounded."""
        bits, groups = self.settings.get("act_bits"), self.settings.get("act_groups", 1)
        return method_text(self.method, self.activations, bits, groups)

    @property
    def summary(self) -> str:
        """Method, bits per weight and size of the network's weights."""
        return (
            f"{self.method_text}, {self.bits_per_weight:.2f} bits per weight, "
            f"{size_text(self.bytes_after)} instead of {size_text(self.bytes_before)}"
        )

    def to_json(self) -> bytes:
        """The same provenance gives the same bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def method_text(method: str, activations: str | None, act_bits: Any, act_groups: Any) -> str:
    """A method, and how it rounds inputs: to integers of so many bits, with ranges for so many
    groups of steps, or to the format of the weights."""
    if activations is None:
        return method
    form = f"in {act_bits} bits" if act_bits else "in the format of the weights"
    ranges = f" with ranges for {act_groups} groups of steps" if act_groups != 1 else ""
    return f"{method}, activations {form}{ranges}, {activations}"


def read_provenance(folder: Path) -> Provenance:
    """Of an export, or FileError."""
    path = folder / NAME
    if not path.exists():
        raise FileError(f"{at(folder)}: no {NAME}. Expected a folder that `lydite quantize` made.")
    try:
        return msgspec.convert(read_json(path), Provenance)
    except msgspec.ValidationError as error:
        raise FileError(f"{at(path)}: not the record of an export ({error}).") from error
