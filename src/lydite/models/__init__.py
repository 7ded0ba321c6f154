"""`mlx.nn` modules: config in, arrays out. Arithmetic only; names follow diffusers."""

from lydite.core.blas import preload

preload()  # a fast BLAS has to be in the process before any file of this room imports MLX
