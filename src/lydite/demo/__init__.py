"""The story `lydite demo` tells on the model inside the package: one chapter per file."""

from lydite.core.blas import preload

preload()  # before any file of this room imports MLX
