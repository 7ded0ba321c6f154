"""What is known of a schedule beside its code."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lydite.core.errors import InputError
from lydite.sampling.schedules.schedule import (
    MOST_STEPS,
    Final,
    ModelSigmas,
    Points,
    Schedule,
    check_count,
    finished,
)


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule under its name; `points` gives its sigmas for (model, steps, options)."""

    name: str
    points: Callable[..., Points]
    about: str  # in one line
    source: str  # where it is from: the paper, or the program that made it known
    proofs: tuple[str, ...]  # "k-diffusion", "diffusers EulerDiscreteScheduler", "ComfyUI", …
    noise_models: tuple[str, ...] = ("ve", "flow")
    count: str = "n"  # how many steps come of n
    needs: tuple[str, ...] = ()  # options without a default

    def make(
        self, steps: int, model: ModelSigmas, *, final: Final = "zero", **options: Any
    ) -> Schedule:
        """The schedule in `steps` steps for one model."""
        check_count("steps", steps, MOST_STEPS)
        if model.noise_model.name not in self.noise_models:
            kinds = {"ve": "eps and v", "flow": "flow"}
            raise InputError(
                f"schedule {self.name} is for {kinds[self.noise_models[0]]} models, not for "
                f"{kinds[model.noise_model.name]} ones. See `lydite sampler list`."
            )
        self._check_options(options)
        return finished(self.name, self.points(model, steps, **options), model, final)

    @property
    def options(self) -> dict[str, Any]:
        """What can be chosen, each with its default."""
        parameters = inspect.signature(self.points).parameters.values()
        return {each.name: each.default for each in parameters if each.kind == each.KEYWORD_ONLY}

    def _check_options(self, options: dict[str, Any]) -> None:
        known = self.options
        for name in options:
            if name not in known:
                raise InputError(
                    f"schedule {self.name} has no option {name!r}; it has "
                    f"{', '.join(known) or 'none'}."
                )
        for name in self.needs:
            if name not in options:
                raise InputError(f"schedule {self.name} needs the option {name!r}.")
