"""Lydite runs, verifies and quantizes diffusion models on MLX."""

__version__ = "0.1.0"
