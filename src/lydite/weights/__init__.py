"""What is in a checkpoint, where each tensor goes, and whether everything is accounted for."""

from lydite.core.blas import preload

preload()  # before load.py or save.py imports MLX
