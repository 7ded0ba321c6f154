"""The reference times a constant, plus a constant, or both."""

from math import sqrt

from lydite.diff.findings.constants import FACTORS, name_factor, name_shift
from lydite.diff.findings.evidence import Evidence, Explanation
from lydite.diff.findings.sums import affine, scale, shift
from lydite.diff.result import Finding

_RANGES = {  # a·r + b of pictures: how the port's range came from the reference's
    (0.5, 0.5): "[0, 1] where the reference has [−1, 1]",
    (2.0, -1.0): "[−1, 1] where the reference has [0, 1]",
    (127.5, 127.5): "[0, 255] where the reference has [−1, 1]",
    (1 / 127.5, -1.0): "[−1, 1] where the reference has [0, 255]",
}


def negated(e: Evidence) -> Finding | None:
    """The reference with the other sign."""
    if not e.same_shape:
        return None
    s = e.sums
    left = sqrt(max(float(s.pp[0] + s.rr[0] + 2 * s.rp[0]), 0.0))
    if not e.explains(left):
        return None
    return Explanation(
        "negated",
        f"The port is the reference times −1; {e.leaves(left)}.",
        "Turn the sign: a difference taken the other way round (noise − sample, sine of the "
        "negative angle), or a velocity where noise was meant.",
        left <= e.noise(),
    )


def scaled(e: Evidence) -> Finding | None:
    """The reference times a constant."""
    if not e.same_shape:
        return None
    if e.port.size < 8 and e.kind in ("scalar", "schedule"):
        return _scaled_scalar(e)
    factors, squares = scale(e.sums)
    factor, left = float(factors[0]), sqrt(squares)
    if not e.explains(left, free=1, scale=factor):
        return None
    tolerance = 4 * max(left / e.norms[1], e.rounding)
    name = name_factor(factor, tolerance, e.port.shape)
    return _scaled(e, factor, name, left)


def shifted(e: Evidence) -> Finding | None:
    """The reference plus a constant."""
    if not e.same_shape:
        return None
    offsets, squares = shift(e.sums)
    offset, left = float(offsets[0]), sqrt(squares)
    if not e.explains(left, free=1, scale=1.0):
        return None
    name = name_shift(offset, 4 * max(left / (abs(offset) * sqrt(e.port.size)), e.rounding))
    return Explanation(
        "shifted",
        f"The port is the reference plus {offset:.6g}{f' ({name})' if name else ''}; "
        f"{e.leaves(left)}.",
        "Look for an offset or shift factor that is applied once too often or not at all"
        f"{' (steps_offset, or counting from 1)' if e.kind == 'schedule' else ''}.",
        left <= e.noise(),
    )


def scaled_and_shifted(e: Evidence) -> Finding | None:
    """The reference times a constant plus a constant."""
    if not e.same_shape:
        return None
    factors, offsets, squares = affine(e.sums)
    factor, offset, left = float(factors[0]), float(offsets[0]), sqrt(squares)
    if not e.explains(left, free=2, scale=factor):
        return None
    tolerance = max(1e-4, 4 * e.rounding, left / e.norms[1])
    image = next(
        (
            words
            for (a, b), words in _RANGES.items()
            if abs(factor / a - 1) <= tolerance and abs(offset - b) <= tolerance * abs(b)
        ),
        None,
    )
    fix = (
        f"Change the range: the port has {image}."
        if image
        else f"Take the port's value minus {offset:.6g}, over {factor:.6g}: a scale and a shift "
        "factor are missing, applied twice or in the other order."
    )
    return Explanation(
        "scaled-and-shifted",
        f"The port is {factor:.6g} × the reference plus {offset:.6g}; {e.leaves(left)}.",
        fix,
        left <= e.noise(factor),
    )


def _scaled_scalar(e: Evidence) -> Finding | None:
    """Of a few numbers only a factor of 1000 is no coincidence."""
    reference, port = (value.reshape(-1).astype(float) for value in e.values)
    for factor, name in ((1e3, "1000"), (1e-3, "1/1000")):
        if port.any() and (abs(port - factor * reference) <= 1e-5 * abs(port)).all():
            return _scaled(e, factor, f"{name}, {FACTORS[1][1].split(', ')[1]}", 0.0)
    return None


def _scaled(e: Evidence, factor: float, name: str | None, left: float) -> Finding:
    fix = f"Divide by {factor:.6g}"
    if name is None:
        fix += ", or find the factor that is missing: 1/√d of attention, c_in of the sampler, "
        fix += "alpha over rank of a LoRA."
    elif "variance" in name:
        fix = "Take the other variance: torch's norms divide by n, not by n − 1."
    elif "√" in name:
        fix += ": a 1/√d of attention or an embedding's √d is missing, applied twice, or of "
        fix += "another size."
    elif "VAE" in name or "autoencoder" in name:
        fix += ": the factor is missing, applied twice, or on the wrong side."
    elif "1000" in name:
        fix += ": one side counts time from 0 to 1, the other from 0 to 1000."
    else:
        fix += ": it is applied once too often or not at all; of attention's scores, √width stands "
        fix += "for √(head size)."
    return Explanation(
        "scaled",
        f"The port is {factor:.6g} × the reference{f' = {name}' if name else ''}; "
        f"{e.leaves(left)}.",
        fix if fix.endswith(".") else fix + ".",
        left <= e.noise(factor),
    )
