"""Seeded bugs and their truth: what a parity debugger is scored on.

Every bug is a context manager that patches a live pipeline from outside and puts it back.
"""

from lydite.core.blas import preload

preload()  # before MLX is imported
