"""Self-test values: made from a framework's own views, they show whether a writer is correct.

A strided view written as raw memory is a common bug of a port, and of a writer. These values
distinguish "the trace is wrong" from "the model is wrong".
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import LyditeError
from lydite.trace.events import STORED_AS, Event
from lydite.trace.reader import Trace

PREFIX = "selftest/"
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 1e-40, 1.0, -1.0, 65504.0)
_WORDS = ("NaN", "+Inf", "−Inf", "−0.0", "1e-40", "1", "−1", "65504")
_VIEWS = {
    "transposed": "equals the untransposed buffer",
    "sliced": "equals the unsliced buffer",
    "broadcast": "equals the buffer behind the row that was broadcast",
}
VALUES = ("contiguous", *_VIEWS, "special")


class Records(Protocol):
    """A Recorder, or anything that records like one."""

    def record(self, name: str, value: Any, *, kind: str) -> Any:
        """Keep one value."""
        ...


def write_selftest(recorder: Records, dtypes: tuple[str, ...] = ("f32",)) -> None:
    """Record the values as NumPy views; mlx_capture and torch_capture do so with theirs."""
    record_all(recorder, {name: expected(name) for name in (*VALUES, *dtypes)})


def record_all(recorder: Records, values: Mapping[str, Any]) -> None:
    """Record self-test values that a framework made."""
    for name, value in values.items():
        recorder.record(PREFIX + name, value, kind="selftest")


def expected(name: str) -> NDArray[Any]:
    """What a self-test value has to be: one of VALUES, or arange(8) in a dtype of the format."""
    if name in STORED_AS:
        complex_ = {"c64": np.dtype(np.complex64), "c128": np.dtype(np.complex128)}
        return np.arange(8).astype(complex_.get(name) or NUMPY_DTYPES[STORED_AS[name]])
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return {
        "contiguous": a,
        "transposed": a.transpose(2, 0, 1),
        "sliced": a[:, ::2, 1::2],
        "broadcast": np.broadcast_to(a[0, 0], (3, 4)),
        "special": np.array(SPECIAL, np.float32),
    }[name]


def check_selftest(trace: Trace) -> tuple[str, ...]:
    """What is wrong with the trace, one sentence each; nothing when it has no self-test."""
    return tuple(f"{problem}." for problem in _problems(trace))


def _problems(trace: Trace) -> Iterator[str]:
    for event in trace.events:
        name = event.name.removeprefix(PREFIX)
        if name == event.name or (name not in VALUES and name not in STORED_AS):
            continue
        if (problem := _problem(trace, event, name)) is not None:
            yield f"{event.name} {problem}"


def _problem(trace: Trace, event: Event, name: str) -> str | None:
    want, dtype = expected(name), name if name in STORED_AS else "f32"
    if event.shape != want.shape:
        return f"has shape {list(event.shape)}, expected {list(want.shape)}"
    if event.dtype != dtype:
        return f"was recorded as {event.dtype}, expected {dtype}"
    try:
        values = trace.read(event)
    except LyditeError as error:
        return f"cannot be read: {error}".rstrip(".")
    if values.dtype != want.dtype:  # stored wider
        values = values.astype(want.dtype)
    if _same(values, want):
        return None
    for recognize in (_raw_memory, _byte_order, _column_order, _changed_values):
        if (reason := recognize(name, values, want)) is not None:
            return reason
    where = tuple(int(index) for index in np.argwhere(values != want)[0])
    return f"has {values[where]} at {list(where)}, expected {want[where]}"


def _same(values: NDArray[Any], want: NDArray[Any]) -> bool:
    """Equal bit by bit, but for the payload of a NaN."""
    if values.tobytes() == want.tobytes():
        return True
    if want.dtype != np.float32:
        return False
    return _changed(values, want).size == 0


def _changed(values: NDArray[Any], want: NDArray[Any]) -> NDArray[np.intp]:
    """Where bits of float32 values differ and not both are NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32), np.ascontiguousarray(want).view(np.uint32)
    return np.flatnonzero((bits[0] != bits[1]) & ~(np.isnan(values) & np.isnan(want)))


def _raw_memory(name: str, values: NDArray[Any], want: NDArray[Any]) -> str | None:
    if any(values.tobytes() == raw.tobytes() for raw in _memory(name, want.size)):
        return f"was written as raw memory ({_VIEWS[name]}): strides were ignored"
    return None


def _memory(name: str, size: int) -> tuple[NDArray[Any], ...]:
    """What a writer that ignores strides may write instead of a view."""
    a = expected("contiguous").reshape(-1)
    starts = {"transposed": (0,), "broadcast": (0,), "sliced": (1, 0)}  # with and without offset
    return tuple(a[start : start + size] for start in starts.get(name, ()))


def _byte_order(name: str, values: NDArray[Any], want: NDArray[Any]) -> str | None:
    width = want.dtype.itemsize // (2 if want.dtype.kind == "c" else 1)
    if width == 1:
        return None
    turned = np.frombuffer(values.tobytes(), np.uint8).reshape(-1, width)[:, ::-1]
    if turned.tobytes() == want.tobytes():
        return "has the bytes of each value in reverse: big-endian was written, not little-endian"
    if any(turned.tobytes() == raw.tobytes() for raw in _memory(name, want.size)):
        return "has the bytes of each value in reverse, and strides were ignored"
    return None


def _column_order(name: str, values: NDArray[Any], want: NDArray[Any]) -> str | None:
    if want.ndim > 1 and values.tobytes() == want.ravel(order="F").tobytes():
        return "was written with its first axis varying fastest: expected C order, the last"
    return None


def _changed_values(name: str, values: NDArray[Any], want: NDArray[Any]) -> str | None:
    if name != "special":
        return None
    wrong = [f"{_WORDS[index]} became {_word(values[index])}" for index in _changed(values, want)]
    flushed = " (subnormal numbers are flushed to zero)" if values[4] == 0 else ""
    return f"has changed values: {', '.join(wrong)}{flushed}"


def _word(value: Any) -> str:
    return "−0.0" if value == 0 and np.signbit(value) else f"{value:g}"
