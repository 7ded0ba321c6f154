"""Everything but the seed that decides a picture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from lydite.core.errors import InputError
from lydite.pipelines.images import Pixels
from lydite.pipelines.noise import NOISES
from lydite.sampling.conventions import find_convention
from lydite.sampling.noise_model import FLOW
from lydite.sampling.samplers import Sampler, find_sampler

MOST_TOKENS = 4096  # of T5, which learnt on 512
# The options of samplers that are mere numbers, from and to; `Sampler.run` takes all the others.
NUMBERS = {
    "eta": (0.0, 10.0),
    "s_noise": (0.0, 10.0),
    "gamma": (0.0, 10.0),
    "curvature": (0.0, 1.0),
    "r": (0.01, 1.0),
    "rtol": (1e-4, 1.0),
    "atol": (1e-4, 1.0),
}


@dataclass(frozen=True)
class Request:
    """Everything but the seed that decides a picture."""

    prompt: str
    negative: str = ""
    steps: int = 28
    guidance: float = 7.0  # 1 or less: the negative prompt is not used, but by CFG++
    guidance_steps: tuple[float, ...] = ()  # one for each step that runs, in place of `guidance`
    guidance_rescale: float = 0.0  # how much of the way back to the spread of the prompt alone
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # shares of the steps that are guided
    width: int | None = None  # None: the size the model was made for, or the image's
    height: int | None = None
    sampler: str = "euler"
    options: Mapping[str, float] = field(default_factory=dict)  # the sampler's: eta, s_noise, …
    schedule: str = "sd3_diffusers"
    convention: str = "lydite"  # whose choices where programs differ under one name
    text_length: int = 256  # T5 tokens; as many zero vectors when there is no T5
    noise: str = "torch"  # whose generator a seed means
    image: Pixels | None = None  # img2img: where to start from
    strength: float = 0.6  # img2img: how much of the way from noise to run

    @property
    def is_guided(self) -> bool:
        """Whether the network is also asked without the prompt."""
        return max(self.guidance_steps or (self.guidance,)) > 1 or find_sampler(self.sampler).pair


def check_request(request: Request) -> None:
    """What can be refused without a model."""
    find_convention(request.convention)
    sampler = find_sampler(request.sampler)
    sampler.check_noise_model(FLOW)
    _check_numbers(sampler, request.options)
    if request.noise not in NOISES:
        raise InputError(f"noise is {request.noise!r}; expected one of {', '.join(NOISES)}.")
    if not 1 <= request.text_length <= MOST_TOKENS:
        raise InputError(f"text_length is {request.text_length}; expected 1 to {MOST_TOKENS}.")
    for scale in (request.guidance, *request.guidance_steps):
        if not isfinite(scale):
            raise InputError(f"guidance is {scale}; expected a finite number.")
    if not 0 <= request.guidance_rescale <= 1:
        raise InputError(f"guidance_rescale is {request.guidance_rescale}; expected 0 to 1.")


def _check_numbers(sampler: Sampler, options: Mapping[str, float]) -> None:
    """Only what can be set is offered: some options of a sampler are no numbers."""
    known = [name for name in sampler.options if name in NUMBERS]
    for name, value in options.items():
        if name not in known:
            raise InputError(
                f"sampler {sampler.name} has no option {name!r:.60} that can be set here; "
                f"it has {', '.join(known) or 'none'}."
            )
        low, high = NUMBERS[name]
        if not low <= value <= high:
            raise InputError(f"option {name} is {value}; expected {low:g} to {high:g}.")
