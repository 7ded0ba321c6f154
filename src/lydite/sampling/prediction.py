"""Prediction types: from what a network predicts to the denoised image, and from image to noise.

A flow model sees x = σ·noise + (1 − σ)·image and predicts the velocity noise − image. Pass float32:
with a bf16 velocity the product σ·v would already be rounded to bf16.
"""

from lydite.sampling.steps import A


def flow_denoised(x: A, velocity: A, sigma: float) -> A:
    """The image a velocity points at: x − σ·v."""
    return x - velocity * sigma


def flow_noised(image: A, noise: A, sigma: float) -> A:
    """Where img2img starts: the image with its share of noise at `sigma`."""
    return noise * sigma + image * (1 - sigma)
