"""Whether `mx.compile` is on, and how to turn it off for a while."""

from collections.abc import Generator
from contextlib import contextmanager

import mlx.core as mx


@contextmanager
def not_compiled() -> Generator[None]:
    """Turn mx.compile off: values are seen, and exchanged layers used, only outside of it."""
    compiled = compiles()
    mx.disable_compile()
    try:
        yield
    finally:
        if compiled:
            mx.enable_compile()


def compiles() -> bool:
    """Whether mx.compile is on. MLX does not tell; a compiled body runs once only."""
    calls: list[None] = []

    def body(x: mx.array) -> mx.array:
        calls.append(None)
        return x

    compiled = mx.compile(body)
    for _ in range(2):
        compiled(mx.array(0))
    return len(calls) == 1
