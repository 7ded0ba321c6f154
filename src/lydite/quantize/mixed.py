"""Mixed precision: a width for each layer, so that a target of bits per weight is met with the
least total error.

Errors of layers add up. Of each layer only those widths count that lie on the lower convex hull of
error over stored bits; there the gain per bit falls from one width to the next. So taking the step
with the largest gain per bit, again and again, visits exactly the optima of the Lagrangian: at each
budget it reaches, no other choice has a smaller error. Between two such budgets the step that does
not fit is left out, and smaller ones are tried: what is lost is less than the gain of that one
step. An integer programme could win that much, one layer's step of hundreds, and would need a
solver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from heapq import heapify, heappop, heappush

from lydite.core.errors import InputError
from lydite.quantize.plan import LayerPlan, Plan, uniform_plan
from lydite.quantize.sensitivity import Sensitivity
from lydite.weights.quantized_format import BITS, is_sensitive
from lydite.weights.rules import Shape

# Of the squared error of rounding to nearest, what GPTQ and learned rounding leave: the errors of
# modules are halved in both models of docs/quantization.md.
LEFT = 0.25


@dataclass(frozen=True)
class Choice:
    """One way to store a layer."""

    plan: LayerPlan
    stored: float  # bits of the whole layer, with scales and offsets
    error: float  # squared


def choose(choices: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, Choice]:
    """A choice for each layer: at most `budget` bits in all, least sum of errors."""
    hulls = {path: lower_hull(each) for path, each in choices.items()}
    chosen = {path: hull[0] for path, hull in hulls.items()}
    left = budget - sum(choice.stored for choice in chosen.values())
    if left < 0:
        raise InputError(
            f"the layers take {budget - left:.0f} bits at least, and {budget:.0f} are allowed."
        )
    steps = [(-_gain(*hull[:2]), path, 1) for path, hull in hulls.items() if len(hull) > 1]
    heapify(steps)
    while steps:
        _, path, number = heappop(steps)
        hull = hulls[path]
        cost = hull[number].stored - hull[number - 1].stored
        if cost > left:
            continue  # neither this nor a later step of the layer
        left -= cost
        chosen[path] = hull[number]
        if number + 1 < len(hull):
            heappush(steps, (-_gain(*hull[number : number + 2]), path, number + 1))
    return chosen


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """From the smallest on, those with the least error for their size, with falling gains."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.stored, choice.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(one: Choice, other: Choice) -> float:
    """Error saved by each bit of a step."""
    return (one.error - other.error) / (other.stored - one.stored)


def left_in(plan: Plan, leave_out: Sequence[str]) -> Plan:
    """Without the layers that match a pattern."""
    layers = {
        path: layer
        for path, layer in plan.layers.items()
        if not any(fnmatchcase(path, pattern) for pattern in leave_out)
    }
    if not layers:
        raise InputError("all layers are left out.")
    return Plan(layers)


def mixed_plan(
    shapes: Mapping[str, Shape],
    sensitivity: Sensitivity,
    bits_per_weight: float,
    *,
    modulation_bits: int = min(BITS),
    leave_out: Sequence[str] = (),
    calibrated: bool = False,
) -> Plan:
    """The linears inside the blocks, with `bits_per_weight` of all of them together at most.

    `modulation_bits` is the least width of layers that compute modulation, whose error is measured
    like that of any other. Layers whose path matches a pattern of `leave_out` stay as they are.
    `calibrated` is for methods that learn from rows, which no layer of the modulation has.
    """
    group = sensitivity.group
    paths = left_in(uniform_plan(shapes, min(BITS), group), leave_out).layers
    choices: dict[str, list[Choice]] = {}
    for path in paths:
        if path not in sensitivity.errors:
            raise InputError(f"{path}: its sensitivity was not measured.")
        shape = shapes[f"{path}.weight"]
        least = modulation_bits if is_sensitive(f"{path}.weight") else min(BITS)
        plans = [LayerPlan(bits, group) for bits in BITS if bits >= least]
        share = LEFT if calibrated and not is_sensitive(f"{path}.weight") else 1.0
        choices[path] = [
            Choice(
                plan,
                plan.bits_per_weight(shape) * shape[0] * shape[1],
                share * sensitivity.squared(path, plan.bits),
            )
            for plan in plans
        ]
    weights = sum(shapes[f"{path}.weight"][0] * shapes[f"{path}.weight"][1] for path in paths)
    least_bits = sum(lower_hull(each)[0].stored for each in choices.values()) / weights
    if bits_per_weight < least_bits:
        raise InputError(
            f"{bits_per_weight:g} bits per weight: these layers need {least_bits:.2f} at least."
        )
    chosen = choose(choices, bits_per_weight * weights * (1 + 1e-9))
    return Plan({path: choice.plan for path, choice in chosen.items()})


def expected_error(plan: Plan, sensitivity: Sensitivity) -> float:
    """The relative error of the latents with all layers of a plan rounded to nearest."""
    squares = [sensitivity.squared(path, layer.bits) for path, layer in plan.layers.items()]
    return sum(squares) ** 0.5
