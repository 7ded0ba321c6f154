"""Tables of sigmas and timesteps, as samplers get them wrong."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lydite.diff.findings import find
from lydite.diff.findings.schedules import shift
from support.findings import Array, causes, evidence

STEPS = st.integers(4, 50)
SHIFTS = st.one_of(st.floats(0.2, 0.8), st.floats(1.15, 12.0))


def flow(steps: int, s: float) -> Array:
    return np.append(shift(np.linspace(1, 1 / 1000, steps), s), 0).astype(np.float32)


def karras(steps: int) -> Array:
    return np.linspace(14.6 ** (1 / 7), 0.03 ** (1 / 7), steps) ** 7


def found(reference: Array, port: Array) -> dict[str, str]:
    e = evidence(reference, np.asarray(port, np.float32), kind="schedule", floor=1e-7)
    return {finding.cause: finding.evidence for finding in find(e)}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(steps=STEPS, s=SHIFTS, other=SHIFTS)
def test_flow_matching(steps: int, s: float, other: float) -> None:
    assume(abs(s / other - 1) > 0.05 and abs(s * s / other - 1) > 0.05)
    table = flow(steps, s)
    assert found(table, table) == {}
    assert "at the end: 0" in found(table, table[:-1])["schedule-length"]
    assert "has more" in found(table[:-1], table)["schedule-length"]
    assert "at the start" in found(table, table[1:])["schedule-length"]
    assert "timestep-for-sigma" in found(table, 1000 * table)
    assert "sigma-for-timestep" in found(1000 * table, table)
    assert "sigma-for-timestep" in found(1000 * table[:-1], table)
    assert "shifts twice" in found(table, shift(table, s))["flow-shift"]
    assert "does not shift" in found(table, flow(steps, 1.0))["flow-shift"]
    assert f"shifts by {other:.4g}"[:14] in found(table, flow(steps, other))["flow-shift"]
    assert "flow-shift" in found(1000 * table, 1000 * flow(steps, other))
    assert "schedule-off-by-one" in found(table, np.append(table[1:], -1))


@pytest.mark.parametrize("verb", ["misses", "has more"])
@pytest.mark.parametrize("end", ["start", "end"])
@pytest.mark.parametrize(("count", "reported"), [(1, True), (2, True), (3, False)])
def test_one_or_two_entries_more_or_fewer(count: int, reported: bool, end: str, verb: str) -> None:
    table = karras(12).astype(np.float32)
    first, last = np.split(table, [count if end == "start" else -count])
    rest, short = (first, last) if end == "start" else (last, first)
    findings = found(table, short) if verb == "misses" else found(short, table)
    numbers = ", ".join(f"{number:g}" for number in rest)
    sentence = f"The port {verb} at the {end}: {numbers}; the other {12 - count} entries agree."
    assert findings.get("schedule-length") == (sentence if reported else None)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(steps=st.integers(5, 50))
def test_karras_and_timesteps(steps: int) -> None:
    even = np.linspace(14.6, 0.03, steps)
    assert "evenly-spaced" in found(karras(steps), even)
    assert "evenly-spaced" in found(np.append(karras(steps), 0), np.append(even, 0))
    assert found(even, karras(steps)) == {}


@pytest.mark.parametrize("steps", [4, 20, 50])
def test_sigmas_that_belong_to_timesteps(steps: int) -> None:
    kept = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    times = (np.arange(steps) * (1000 // steps) + 1)[::-1]
    sigmas = ((1 - kept) / kept)[times] ** 0.5
    assert "√β" in found(times.astype(np.float32), sigmas)["sigma-for-timestep"]
    assert "sigma-for-timestep" in found(times.astype(np.float32), np.append(sigmas, 0))
    assert "timestep-for-sigma" in found(sigmas, times)


def test_an_offset_of_one() -> None:
    times = np.arange(1, 1000, 50)[::-1].astype(np.float32)
    findings = found(times, times - 1)
    assert "plus -1" in findings["timestep-offset"]


def test_karras_sigmas_with_another_rho_or_end() -> None:
    def table(rho: float, end: float) -> Any:
        return np.append(np.linspace(14.6 ** (1 / rho), end ** (1 / rho), 12) ** rho, 0.0)

    assert "ρ = 5" in found(table(7, 0.03), table(5, 0.03))["karras-rho"]
    assert "0.1" in found(table(7, 0.03), table(7, 0.1))["karras-ends"]


def test_a_table_in_16_bits() -> None:
    sigmas = np.linspace(14.6**0.2, 0.03**0.2, 12) ** 5
    assert "float16" in found(sigmas, sigmas.astype(np.float16))["low-precision"]


def test_timesteps_rounded_down() -> None:
    times = np.array([999.0, 851.7, 640.2, 455.9, 211.6, 12.2])
    assert "down" in found(np.round(times), np.floor(times))["timestep-rounding"]


@pytest.mark.parametrize("unit", [1.0, 1000.0])
@pytest.mark.parametrize("steps", [8, 30])
def test_tables_that_are_stretched_to_a_last_sigma(unit: float, steps: int) -> None:
    """As Qwen-Image's: 1 … 1/n shifted by exp(mu), then stretched to end at 0.02."""

    def table(s: float, last: float | None) -> Array:
        sigmas = shift(np.linspace(1, 1 / steps, steps), s)
        if last is not None:
            sigmas = 1 - (1 - sigmas) * (1 - last) / (1 - sigmas[-1])
        return unit * sigmas

    right = table(2.5, 0.02)
    missing = found(right, table(2.5, None))["terminal-stretch"]
    assert "shifted by 2.5 " in missing and "to end at 0.02; " in missing
    other = found(right, table(1.5, 0.02))["flow-shift"]
    assert "the port is one shifted by 1.5 " in other
    assert found(right, right) == {}
    assert "terminal-stretch" not in found(table(2.5, None), right)


def test_four_steps_are_enough() -> None:
    assert causes(
        evidence([1.0, 0.75, 0.5, 0.25], [1000.0, 750.0, 500.0, 250.0], kind="schedule")
    ) == ["timestep-for-sigma"]


def test_unrelated_tables_give_no_finding() -> None:
    draw = np.random.default_rng(0)
    for number in range(200):
        size = int(draw.integers(1, 30))
        a, b = (np.sort(draw.random(size))[::-1] for _ in range(2))
        unit = (1.0, 1000.0, 14.6)[number % 3]
        dtype, floor = (("f32", 1e-7), ("bf16", 2e-3))[number % 2]
        e = evidence(a * unit, b * unit, dtype, floor=floor, kind="schedule")
        assert find(e) == (), (a, b)


def test_a_shift_of_few_steps() -> None:
    even = np.array([1, 0.5, 0], np.float32)
    shifted = np.asarray(shift(even.astype(np.float64), 2.5), np.float32)
    assert "that with a flow shift of 2.5" in found(shifted, even)["flow-shift"]
    assert "The reference's table is even" in found(even, shifted)["flow-shift"]
    odd = np.asarray(shift(even.astype(np.float64), 2.5137), np.float32)
    assert "flow-shift" not in found(odd, even)  # any number is some shift
