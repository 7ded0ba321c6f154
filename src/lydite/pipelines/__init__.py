"""Text to image: the one place where models, weights and sampling meet."""

from lydite.core.blas import preload

preload()  # before any file of this room imports MLX
