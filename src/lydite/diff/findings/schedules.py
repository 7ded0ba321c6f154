"""Tables of sigmas and timesteps: one entry short, another flow shift, another unit."""

from math import log, log2
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from lydite.diff.findings.evidence import BITS, FEW, Evidence, Hypothesis
from lydite.diff.findings.known_schedules import other_settings
from lydite.diff.result import Finding

Table = NDArray[Any]

STEPS = 1000.0  # of training
BETAS = {  # Stable Diffusion 1, 2 and XL; DDPM
    "√β even from 0.00085 to 0.012": (0.00085**0.5, 0.012**0.5, 2),
    "β even from 0.0001 to 0.02": (1e-4, 0.02, 1),
}


def other_length(e: Evidence) -> Finding | None:
    """An entry or two more or fewer at one end."""
    right, wrong = _tables(e)
    short, long = (wrong, right) if wrong.size < right.size else (right, wrong)
    more = long.size - short.size
    if not 0 < more <= 2 or short.size < 2:
        return None
    verb = "misses" if wrong.size < right.size else "has more"
    for part, rest, where in (
        (long[:-more], long[-more:], "end"),
        (long[more:], long[:more], "start"),
    ):
        if _agree(e, short, part):
            numbers = ", ".join(f"{number:g}" for number in rest)
            return Finding(
                "schedule-length",
                f"The port {verb} at the {where}: {numbers}; the other {short.size} entries agree.",
                "Compare the final 0 and how the number of steps is counted: n steps need n + 1 "
                "sigmas and n timesteps.",
            )
    return None


def off_by_one(e: Evidence) -> Finding | None:
    """Every entry is the reference's next, or the one before."""
    right, wrong = _tables(e)
    if right.size != wrong.size or right.size < 4:
        return None
    for expected, actual, word in (
        (right[1:], wrong[:-1], "next"),
        (right[:-1], wrong[1:], "previous"),
    ):
        if _agree(e, actual, expected):
            return Finding(
                "schedule-off-by-one",
                f"Every entry is the reference's {word} one: {wrong[1]:g} at 1, where the "
                f"reference has {right[1]:g}.",
                "Start the table at the reference's first entry: an offset, or the spacing "
                "(leading, trailing, linspace) differs.",
            )
    return None


def displaced_entries(e: Evidence) -> Finding | None:
    """Every entry plus one number, or whole numbers that are rounded in the other direction."""
    right, wrong = _tables(e)
    if right.size != wrong.size or right.size < 3:
        return None
    apart = wrong - right
    if apart[0] and abs(apart[0]) >= 0.5 and _agree(e, wrong, right + apart[0]):
        return Finding(
            "timestep-offset",
            f"Every entry of the port is the reference's plus {apart[0]:g}: it starts at "
            f"{wrong[0]:g}, the reference at {right[0]:g}.",
            "Check the offset of the timesteps (steps_offset): counting from 0 or 1.",
        )
    kinds = {int(step) for step in apart} if (apart == np.round(apart)).all() else set()
    whole = (right == np.round(right)).all()
    if whole and kinds in ({0, -1}, {0, 1}) and np.ptp(right) > 10 * right.size:
        how = "down" if -1 in kinds else "up"
        return Finding(
            "timestep-rounding",
            f"{int(np.count_nonzero(apart))} of {right.size} timesteps are one "
            f"{'smaller' if how == 'down' else 'larger'} than the reference's: the port rounds "
            f"them {how} where the reference does not.",
            "Round the timesteps as the reference does: to the nearest whole number, or down.",
        )
    return None


def coarse_table(e: Evidence) -> Finding | None:
    """The reference's entries in 16 bits."""
    right, wrong = _tables(e)
    if right.size != wrong.size or right.size < 3:
        return None
    for name, dtype in (("float16", np.float16), ("bfloat16", bfloat16)):
        with np.errstate(over="ignore"):
            rounded = right.astype(np.float32).astype(dtype).astype(np.float64)
        if not np.array_equal(rounded, right) and np.allclose(wrong, rounded, rtol=1e-6, atol=0):
            return Finding(
                "low-precision",
                f"The port is the reference rounded to {name}: {wrong[0]:.8g} where the reference "
                f"has {right[0]:.8g}.",
                "Make the table in float32 or float64.",
            )
    return None


def other_rho(e: Evidence) -> Finding | None:
    """Karras sigmas, even in σ^(1/ρ), with another ρ or other ends."""
    right, wrong = (table[table > 0] for table in _tables(e))
    if right.size != wrong.size or right.size < 5:
        return None
    theirs, ours = _rho(right), _rho(wrong)
    if theirs is None or ours is None or theirs == 1:
        return None
    words = f"The reference's sigmas are Karras sigmas, even in σ^(1/ρ) with ρ = {theirs:g}"
    if ours != theirs:
        return Finding(
            "karras-rho",
            f"{words}; the port's with ρ = {ours:g}.",
            f"Use ρ = {theirs:g}.",
        )
    return Finding(
        "karras-ends",
        f"{words}, from {right[0]:.6g} to {right[-1]:.6g}; the port's have the same ρ, from "
        f"{wrong[0]:.6g} to {wrong[-1]:.6g}.",
        "Check the first and last sigma, and whether the even steps reach both.",
    )


def _rho(sigmas: Table) -> float | None:
    """ρ of sigmas that are even in σ^(1/ρ), a whole number; None where there is none."""
    bends = {rho: float(_bend(sigmas ** (1 / rho))) for rho in range(1, 13)}
    best = min(bends, key=lambda rho: bends[rho])
    return float(best) if bends[best] < 1e-4 else None


def thousandfold(e: Evidence) -> Finding | None:
    """Times or over 1000: from 0 to 1 on one side, timesteps on the other."""
    right, wrong = _tables(e)
    size = min(right.size, wrong.size)
    if abs(right.size - wrong.size) > 1 or not right[:size].any():
        return None
    for factor, cause, fix in (
        (STEPS, "timestep-for-sigma", "Divide by 1000: a sigma between 0 and 1 is expected here."),
        (1 / STEPS, "sigma-for-timestep", "Multiply by 1000: a timestep is expected here."),
    ):
        if _agree(e, wrong[:size], factor * right[:size]):
            return Finding(
                cause,
                f"The port is {factor:g} × the reference: it goes from {wrong[0]:g} to "
                f"{wrong[-1]:g}, the reference from {right[0]:g} to {right[-1]:g}.",
                fix,
            )
    return None


def sigma_for_timestep(e: Evidence) -> Finding | None:
    """The noise level that belongs to the timestep, or the reverse."""
    right, wrong = _tables(e)
    size = min(right.size, wrong.size)
    if abs(right.size - wrong.size) > 1 or size < 3:
        return None
    right, wrong = right[:size], wrong[:size]
    for words, (low, high, power) in BETAS.items():
        kept = np.cumprod(1 - np.linspace(low, high, int(STEPS)) ** power)
        sigmas = np.sqrt((1 - kept) / kept)
        for times, levels, cause in (
            (right, wrong, "sigma-for-timestep"),
            (wrong, right, "timestep-for-sigma"),
        ):
            inside = (times >= 0) & (times <= STEPS - 1)
            if inside.sum() < 3 or times.max() < 2:
                continue
            level = np.interp(times[inside], np.arange(STEPS), sigmas)
            # Tables are made in float32 here, and between two timesteps not always so.
            if np.allclose(levels[inside], level, rtol=max(1e-3, FEW * e.rounding), atol=1e-6):
                given, wanted = cause.split("-for-")
                return Finding(
                    cause,
                    f"The port holds the {given}s that belong to the reference's {wanted}s "
                    f"({words}): {wrong[0]:g} where the reference has {right[0]:g}.",
                    f"Use the {wanted} here: the network's embedding takes timesteps, the "
                    "sampler's arithmetic sigmas.",
                )
    return None


def flow_shifted(e: Evidence) -> Finding | None:
    """σ′ = sσ/(1 + (s − 1)σ): the shift of flow matching, once more, once less or another."""
    right, wrong = _tables(e)
    if right.size != wrong.size:
        return None
    unit = STEPS if max(right.max(), wrong.max()) > 1.5 else 1.0
    right, wrong = right / unit, wrong / unit
    if min(right.min(), wrong.min()) < 0 or max(right.max(), wrong.max()) > 1 + 1e-6:
        return None
    inside = (np.minimum(right, wrong) > 1e-4) & (np.maximum(right, wrong) < 0.9999)
    if inside.sum() < 3:
        return _unshifted(right, wrong, inside)
    r, w = right[inside], wrong[inside]
    s = float(np.median(w * (1 - r) / (r * (1 - w))))
    if abs(s - 1) < 1e-3 or not _agree(e, wrong, shift(right, s), free=1):
        return None
    own = _own_shift(right)
    evidence = f"The port is the reference with a flow shift of s = {s:.4g} (mu = {log(s):.4g})"
    if own is not None and abs(own - 1) > 1e-3:
        evidence += f"; the reference is an evenly spaced table shifted by {own:.4g}"
        if abs(s / own - 1) < 2e-3:
            evidence += ", so the port shifts twice"
        elif abs(s * own - 1) < 2e-3:
            evidence += ", so the port does not shift"
        else:
            evidence += f", so the port shifts by {s * own:.4g}"
    fix = (
        f"Use the reference's shift{f' of {own:.4g}' if own is not None else ''}, once: a constant "
        "of the configuration, or exp(mu) with mu from the number of image tokens."
    )
    return Finding("flow-shift", evidence + ".", fix)


def _unshifted(right: Table, wrong: Table, inside: Table) -> Finding | None:
    """That one side of a table of a few steps is even, and the other that with a round shift."""
    for even, other, words in (
        (wrong, right, "The port's table is even; the reference's is that with a flow shift of"),
        (right, wrong, "The reference's table is even; the port's is that with a flow shift of"),
    ):
        if not inside.any() or even.size < 3 or _bend(even) > 1e-6:
            continue
        a, b = even[inside], other[inside]
        s = float(np.median(b * (1 - a) / (a * (1 - b))))
        if abs(s - 1) > 1e-3 and np.allclose(other, shift(even, round(s, 2)), rtol=0, atol=2e-6):
            text = f"{words} {s:.4g} (mu = {log(s):.4g})."
            fix = "Shift the sigmas as the reference: once, by its constant or exp(mu)."
            return Finding("flow-shift", text, fix, "likely")
    return None


def stretched(e: Evidence) -> Finding | None:
    """Shifted even steps that are stretched to end at a terminal sigma, as Qwen-Image's."""
    right, wrong = _tables(e)
    unit = STEPS if max(right.max(initial=0), wrong.max(initial=0)) > 1.5 else 1.0
    if right.size != wrong.size or flow_shifted(e) is not None:
        return None
    expected, found = (_shift_and_stretch(table / unit) for table in (right, wrong))
    if expected is None or found is None:
        return None
    (s, terminal, is_stretched), (own_s, own_terminal, own_stretched) = expected, found
    if not is_stretched:
        return None
    what = f"shifted by {s:.4g} (mu = {log(s):.4g}) and stretched to end at {terminal:.4g}"
    own = f"shifted by {own_s:.4g} (mu = {log(own_s):.4g})"
    if not own_stretched:
        return Finding(
            "terminal-stretch",
            f"The reference is an even table {what}; the port is one {own}, not stretched.",
            "Stretch the sigmas after the shift: 1 − (1 − σ)·(1 − terminal)/(1 − last σ).",
        )
    if abs(own_s / s - 1) > 1e-3:
        return Finding(
            "flow-shift",
            f"The reference is an even table {what}; the port is one {own} and stretched to end at "
            f"{own_terminal:.4g}.",
            "Compare the first and last sigma before the shift, and mu: another end of the even "
            "table gives the same sigmas as another mu. mu is a line in the number of image "
            "tokens, through the two points of the scheduler's config; the shift is exp(mu), or mu "
            "itself with a linear time_shift_type.",
        )
    return None


def evenly_spaced(e: Evidence) -> Finding | None:
    """Evenly spaced from the reference's first entry on, where the reference is not."""
    right, wrong = _tables(e)
    if right.size != wrong.size or right.size < 5:
        return None
    inner = slice(None, -1 if right[-1] == wrong[-1] == 0 else None)
    right, wrong = right[inner], wrong[inner]
    reach = abs(right[0] - right[-1])
    if (
        reach == 0
        or abs(right[0] - wrong[0]) > 0.02 * reach
        or _bend(wrong) > 1e-3
        or _bend(right) < 1e-2
    ):
        return None
    return Finding(
        "evenly-spaced",
        f"The port goes from {wrong[0]:g} to {wrong[-1]:g} in even steps of "
        f"{abs(wrong[1] - wrong[0]):g}; the reference's steps go from "
        f"{np.abs(np.diff(right)).min():.3g} to {np.abs(np.diff(right)).max():.3g}.",
        "Use the reference's spacing: a shift, Karras or exponential spacing is missing, or "
        "timesteps were not derived from the sigmas.",
    )


SCHEDULES: tuple[Hypothesis, ...] = (
    other_length,
    off_by_one,
    coarse_table,
    thousandfold,
    sigma_for_timestep,
    flow_shifted,
    stretched,
    other_settings,
    other_rho,
    displaced_entries,
    evenly_spaced,
)


def shift(sigmas: Table, s: float | Table) -> Table:
    """The shift of flow matching."""
    return s * sigmas / (1 + (s - 1) * sigmas)


def _tables(e: Evidence) -> tuple[Table, Table]:
    return e.reference.reshape(-1).astype(np.float64), e.port.reshape(-1).astype(np.float64)


def _agree(e: Evidence, wrong: Table, right: Table, free: int = 0) -> bool:
    """Whether two tables are equal to within rounding, in enough entries to mean something."""
    if wrong.size != right.size or wrong.size == 0:
        return False
    close = max(FEW * e.rounding, 2e-6)
    limit = close * np.abs(right).max()
    if right.size > 1:  # entries far from zero and close together would all agree
        limit = min(limit, 0.02 * float(np.ptp(right)))
    if np.abs(wrong - right).max() > limit:
        return False
    return bool((np.unique(right).size - free) * log2(1 / close) >= min(BITS, 18 * right.size))


def _bend(tables: Table) -> Table:
    """How far each row is from a straight line, over its range."""
    first, last = tables[..., :1], tables[..., -1:]
    line = first + (last - first) * np.linspace(0, 1, tables.shape[-1])
    reach = np.maximum(np.abs(last - first)[..., 0], 1e-300)
    return np.abs(tables - line).max(axis=-1) / reach


def _shift_and_stretch(sigmas: Table) -> tuple[float, float, bool] | None:
    """The shift of an even table 1 … 1/n, its last sigma, and whether that is stretched."""
    table = sigmas[sigmas > 0]
    if table.size < 4 or abs(table[0] - 1) > 1e-6 or np.diff(table).max() >= 0:
        return None
    even = np.linspace(1.0, 1 / table.size, table.size)

    def uneven(logs: Table) -> Table:
        ratios = (1 - table[1:]) / (1 - shift(even[1:], np.exp(logs)[:, None]))
        return np.ptp(ratios, axis=1) / ratios.mean(axis=1)

    best, reach = 0.0, log(100.0)
    for _ in range(6):  # each time around the best, fifty times finer
        tried = np.linspace(best - reach, best + reach, 201)
        best, reach = float(tried[np.argmin(uneven(tried))]), reach / 50
    if uneven(np.array([best]))[0] > 2e-5:
        return None
    s, last = float(np.exp(best)), float(table[-1])
    return s, last, abs(last / float(shift(even[-1:], s)[0]) - 1) > 1e-3


def _own_shift(sigmas: Table) -> float | None:
    """The shift that an even table got, or None when there is none that fits."""
    table = sigmas[sigmas > 0]
    if table.size < 4:
        return None
    best, reach = 0.0, log(100.0)
    for _ in range(6):  # each time around the best, fifty times finer
        tried = np.linspace(best - reach, best + reach, 201)
        bends = _bend(shift(table, np.exp(-tried)[:, None]))
        best, reach = float(tried[np.argmin(bends)]), reach / 50
    return float(np.exp(best)) if _bend(shift(table, np.exp(-best))) < 1e-4 else None
