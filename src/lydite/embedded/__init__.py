"""The model inside the package, a tiny trained Stable Diffusion 3, and its judge."""

from pathlib import Path

NAME = "embedded"  # what --model calls it
MODEL = Path(__file__).parent / "model"  # in diffusers' layout
