"""Names in a trace for what passes between the networks; our side and the reference's use these."""

SIGMAS, TIMESTEPS = "pipeline/sigmas", "pipeline/timesteps"
NOISE, LATENTS, IMAGE = "pipeline/noise", "pipeline/latents", "pipeline/image"
_PREDICTIONS = {"flow": "velocity", "eps": "epsilon", "v": "v", "x0": "sample"}


def token_ids(encoder: str) -> str:
    """`text_encoder_2` reads `pipeline/token_ids_2`."""
    return f"pipeline/{encoder.replace('text_encoder', 'token_ids')}"


def prediction(name: str) -> str:
    """What the sampler's step is computed from, guidance included, by the prediction type."""
    return f"pipeline/{_PREDICTIONS.get(name, name)}"
