"""A small model with a set of its own."""

from support.small_set import drawn, opened, pipeline

__all__ = ("drawn", "opened", "pipeline")
