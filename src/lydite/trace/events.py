"""The data of a trace: its header, its events, the statistics of a value.

The format is docs/trace-format.md. Files may come from anybody, so every field is bounded.
"""

import re
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

FORMAT, VERSION = "lydite-trace", 1

# dtype in an event -> dtype in a safetensors header; complex is stored as a trailing axis of two
STORED_AS = {
    "f64": "F64",
    "f32": "F32",
    "bf16": "BF16",
    "f16": "F16",
    "f8_e4m3": "F8_E4M3",
    "f8_e5m2": "F8_E5M2",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
    "i8": "I8",
    "u64": "U64",
    "u32": "U32",
    "u16": "U16",
    "u8": "U8",
    "bool": "BOOL",
    "c64": "F32",
    "c128": "F64",
}
KINDS = ("activation", "weight", "input", "ids", "schedule", "scalar", "selftest")
MAX_RANK, MAX_VALUES = 16, 2**40
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")

Index = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Word = Annotated[str, Meta(max_length=200)]
Sketch = Annotated[tuple[float, ...], Meta(min_length=1024, max_length=1024)]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_VALUES)], ...], Meta(max_length=MAX_RANK)]


EventId = tuple[str, str, int, int]  # name, slot, step, call


class Site(NamedTuple):
    """Where a value lies: a module's name and one of its slots (`in.0`, `out`)."""

    name: str
    slot: str = "out"

    def __str__(self) -> str:
        return self.name if self.slot == "out" else f"{self.name} [{self.slot}]"


class Stats(msgspec.Struct, frozen=True):
    """Statistics of a value; the moments are over the finite values, null without any."""

    count: Index
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    nan: Index = 0
    inf: Index = 0
    zero: Index = 0


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One captured value."""

    i: Index
    name: Name
    shape: Shape
    dtype: Word  # in the run; it may be stored wider
    slot: Name = msgspec.field(default="out", name="port")  # "port" in the file
    kind: Word = "activation"
    step: Index = 0
    call: Index = 0
    dims: Word | None = None
    shard: Word | None = None
    key: Word | None = None
    alias_of: Index | None = None
    stats: Stats | None = None
    sketch: Sketch | None = None
    hash: Word | None = None
    t_ms: float | None = None
    mem: int | None = None

    @property
    def site(self) -> Site:
        """Where the value lies: module and slot."""
        return Site(self.name, self.slot)

    @property
    def id(self) -> EventId:
        """What distinguishes this event from every other of its run."""
        return self.name, self.slot, self.step, self.call

    def __str__(self) -> str:
        """The event for people: name, and slot, step and call where they are not the default."""
        parts = [str(self.site)]
        parts += [f"step {self.step}"] if self.step else []
        parts += [f"call {self.call}"] if self.call else []
        return ", ".join(parts)


class Header(msgspec.Struct, frozen=True):
    """trace.json: what computed the values, and under which conditions."""

    format: str = FORMAT
    version: int = VERSION
    side: Word = "port"
    framework: Word = ""
    device: Word = ""
    dtype: Word = ""
    conditions: dict[str, Any] = {}
    capture: dict[str, Any] = {}
    selftest: tuple[Index, ...] = ()
    complete: bool = False


class WeightInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One parameter in weights.json; its data is not in the trace."""

    shape: Shape
    dtype: Word
    hash: Word | None = None
    stats: Stats | None = None


def dtype_name(text: str) -> str:
    """The format's name of a dtype that a framework may spell `torch.bfloat16` or `F32`."""
    word = text.lower().rsplit(".", 1)[-1]
    return _ALIASES.get(word, word)


_ALIASES = {
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",
    "half": "f16",
    "float": "f32",
    "double": "f64",
    "long": "i64",
    "int": "i32",
    "bool_": "bool",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "f8_e4m3",
    "f8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
}
