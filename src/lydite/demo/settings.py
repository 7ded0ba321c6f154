"""What the demo draws, and how much of it."""

from dataclasses import dataclass

from lydite import embedded

PROMPTS = (
    "a large red star above a small blue ring",
    "a green heart on a gradient from lavender to navy",
    "a small yellow moon, a pink square and a white cross",
    "a purple circle to the left of an orange triangle",
    "star",
    "a big cyan ring in the bottom right corner on maroon",
    "from left to right a red circle, a yellow square and a green triangle",
    "a huge white crescent moon on a black background",
    "tiny orange donut, top left, teal background",
    "a pink heart over a black square on a beige background",
    "violet ball",
    "a yellow plus sign at the bottom with a background fading from navy to teal",
)


@dataclass(frozen=True)
class Settings:
    """How much is drawn: all of it in a minute or two on two cores, a few pictures in tests."""

    prompts: tuple[str, ...] = PROMPTS  # picture i starts from seed i
    held_out: int = 36  # prompts the judge is asked about
    held_out_seed: int = 99991  # of benchmarks/prompt_accuracy.py; training drew from others
    steps: int = embedded.STEPS


DEFAULT = Settings()
