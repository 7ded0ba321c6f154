"""Lydite runs, verifies and quantizes diffusion models on MLX."""

import sys

__version__ = "0.1.0"


class _LoadBlasBeforeMLX:
    """Loads a fast BLAS at the moment MLX is imported, by whomever; see lydite.core.blas."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "mlx.core":
            sys.meta_path.remove(self)
            from lydite.core.blas import preload

            preload()


sys.meta_path.insert(0, _LoadBlasBeforeMLX())
