"""What img2img strength means: how many steps are made of a schedule, and how many of them run."""

from collections.abc import Callable
from typing import Literal

from lydite.core.errors import InputError
from lydite.sampling.schedules.schedule import MOST_STEPS, check_count

Meaning = Literal["diffusers", "diffusers_sd3", "comfyui", "a1111"]

# (n, strength) → (steps made, steps run: the last ones).
MEANINGS: dict[str, Callable[[int, float], tuple[int, int]]] = {
    # Its share of the steps, rounded down; SD3 rounds down what is left out instead.
    "diffusers": lambda n, s: (n, int(n * s)),
    "diffusers_sd3": lambda n, s: (n, n - int(n - n * s)),
    # All n steps, out of a longer schedule.
    "comfyui": lambda n, s: (n, n) if s > 0.9999 else (int(n / s), n),
    # Its share and one; its option "exactly the amount of steps" is as ComfyUI.
    "a1111": lambda n, s: (n, int(min(s, 0.999) * n) + 1),
}


def strength_steps(meaning: Meaning, steps: int, strength: float) -> tuple[int, int]:
    """(steps made, steps run) of an img2img at `strength`; without an image it is 1 and (n, n)."""
    if meaning not in MEANINGS:
        raise InputError(f"strength means {meaning!r}; expected one of {', '.join(MEANINGS)}.")
    check_count("steps", steps, MOST_STEPS)
    if not 0 < strength <= 1:
        raise InputError(f"strength is {strength}; expected a number above 0 and at most 1.")
    made, run = (steps, steps) if strength == 1 else MEANINGS[meaning](steps, strength)
    if run < 1:
        raise InputError(f"strength {strength} leaves none of the {steps} steps.")
    return made, min(run, made)
