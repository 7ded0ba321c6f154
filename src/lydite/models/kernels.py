"""Passes of a network that MLX has no single kernel for, each as one kernel on CUDA.

The `_plain_…` functions are the definitions. A kernel reads every value once, computes in float32
and rounds what it writes, so it differs from the plain form by rounding only. It is used where it
was measured to be faster: on CUDA (benchmarks/README.md). Metal has the same bodies, but nobody has
run them: there they are off until a Mac has passed `benchmarks/step.py --check-kernels`.
LYDITE_KERNELS=off takes the plain form everywhere, LYDITE_KERNELS=on also tries Metal.

A norm that is recorded or exchanged is of another class, and is called: whoever observes a network
sees its norms.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.core.errors import ConfigError
from lydite.models import cpu
from lydite.models.kernel_sources import (
    ADD_GATED,
    GELU_TANH,
    GROUP,
    GROUP_APPLY,
    GROUP_SUMS,
    NORM_MODULATE,
    READ_ROW,
    sources,
)

VARIABLE = "LYDITE_KERNELS"
MODES = ("auto", "on", "off")
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
WARP = 32  # threads that add up without shared memory
PIECES = 2  # runs of 16 bytes that a thread holds of a row
WIDEST = 16384  # channels of a row
GROUP_THREADS = 512  # that a group norm has at most
GROUP_BLOCKS = 1024  # groups of threads that a group norm is divided among
GROUP_WIDTH = 128  # channels of a group that one thread adds up: more would cost digits


def norm_modulate(norm: nn.Module, x: mx.array, *, shift: mx.array, scale: mx.array) -> mx.array:
    """The normed x (B, L, D), scaled by 1 + scale and shifted per channel by (B, D) arrays."""
    if _is_plain_norm(norm) and _fit((x,), (shift, scale)):
        return _norm_modulate(norm.eps)(x, shift, scale)
    return _norm_without_kernel(norm, x, shift, scale)


def add_gated(x: mx.array, y: mx.array, gate: mx.array) -> mx.array:
    """x (B, L, D) plus y scaled per channel by (B, D)."""
    if _fit((x, y), (gate,)):
        return _add_gated()(x, y, gate)
    return _plain_sum(x, y, gate)


def add_norm_modulate(
    norm: nn.Module, x: mx.array, y: mx.array, gate: mx.array, *, shift: mx.array, scale: mx.array
) -> tuple[mx.array, mx.array]:
    """`add_gated` of x, y and gate, and `norm_modulate` of that sum."""
    if _is_plain_norm(norm) and _fit((x, y), (gate, shift, scale)):
        total, normed = _add_norm_modulate(norm.eps)(x, y, gate, shift, scale)
        return total, normed
    total = _plain_sum(x, y, gate)
    return total, _norm_without_kernel(norm, total, shift, scale)


def gelu_tanh(x: mx.array) -> mx.array | None:
    """The tanh approximation of GELU; None where no kernel is in use."""
    return _gelu_tanh()(x) if _fit((x,), ()) else None


def group_norm(
    x: mx.array, weight: mx.array, bias: mx.array, *, groups: int, eps: float, silu: bool = False
) -> mx.array | None:
    """Group norm of (B, …, C) over neighbouring channels, and SiLU; None where no kernel is in use.

    The plain form is MLX's own, in float32.
    """
    channels = x.shape[-1]
    fits = (
        in_use()
        and x.dtype in DTYPES
        and x.size > 0
        and weight.dtype == bias.dtype == x.dtype
        and -(-channels // _run(x.dtype)) <= GROUP_THREADS
        and channels // groups <= GROUP_WIDTH
    )
    return _group_norm(groups, eps, silu)(x, weight, bias) if fits else None


def _norm_without_kernel(norm: Any, x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
    if cpu.on_cpu() and _is_plain_norm(norm) and x.dtype == shift.dtype == mx.float32:
        return cpu.norm_modulate(x, shift, scale, norm.eps)
    return _plain_norm(norm, x, shift, scale)


def _plain_norm(norm: Any, x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def _plain_sum(x: mx.array, y: mx.array, gate: mx.array) -> mx.array:
    return x + y * gate[:, None]


def _plain_gelu(x: mx.array) -> mx.array:
    return nn.gelu_approx(x.astype(mx.float32)).astype(x.dtype)


def _plain_group_norm(
    groups: int, eps: float, silu: bool, x: mx.array, weight: mx.array, bias: mx.array
) -> mx.array:
    norm = nn.GroupNorm(groups, x.shape[-1], eps=eps, affine=False, pytorch_compatible=True)
    y = norm(x.astype(mx.float32)) * weight + bias
    return (nn.silu(y) if silu else y).astype(x.dtype)


def in_use() -> bool:
    """Whether kernels are used on this device."""
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise ConfigError(f"{VARIABLE}={mode}: expected one of {', '.join(MODES)}.")
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return on_gpu and mode != "off" and (mx.cuda.is_available() or mode == "on")


@contextmanager
def compiled_meanwhile(width: int, dtype: mx.Dtype) -> Generator[None]:
    """Compile the kernels of a transformer of this width while the block runs.

    MLX compiles a kernel at its first use, about a second each, in every process.
    """
    if not in_use():
        yield
        return
    thread = Thread(target=_run_each, args=(width, dtype))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _run_each(width: int, dtype: mx.Dtype) -> None:
    with mx.stream(mx.new_stream(mx.gpu)):
        x, vector = mx.zeros((1, 1, width), dtype), mx.zeros((1, width), dtype)
        wide = mx.zeros((1, 1, 4 * width), dtype)
        results = [
            _norm_modulate(1e-6)(x, vector, vector),
            _add_gated()(x, x, vector),
            _add_norm_modulate(1e-6)(x, x, vector, vector, vector),
            _gelu_tanh()(wide),
            _group_norm(1, 1e-6, False)(x, vector[0], vector[0]),
        ]
        for result in results:
            mx.eval(result)


def _is_plain_norm(norm: nn.Module) -> bool:
    """Whether it is MLX's layer norm without weights: not one that is recorded."""
    return type(norm) is nn.LayerNorm and "weight" not in norm


def _fit(rows: Sequence[mx.array], vectors: Sequence[mx.array]) -> bool:
    """Whether a kernel takes rows (B, L, D) and vectors (B or 1, D): one shape and dtype each."""
    x = rows[0]
    return (
        in_use()
        and x.ndim == 3
        and x.size > 0
        and x.shape[-1] <= WIDEST
        and x.dtype in DTYPES
        and all(array.dtype == x.dtype for array in (*rows, *vectors))
        and all(array.shape == x.shape for array in rows)
        and all(
            array.shape[-1] == x.shape[-1] and array.shape[0] in (1, x.shape[0])
            for array in vectors
        )
    )


def _run(dtype: mx.Dtype) -> int:
    """Values of 16 bytes."""
    return 16 // dtype.size


def threads_of(width: int, run: int) -> int:
    """How many threads have one row: whole warps, each thread about `PIECES` runs."""
    warps = -(-width // (run * WARP * PIECES))
    return WARP * min(max(warps, 1), 32)


@cache
def _kernel(
    name: str,
    fragments: tuple[str, ...],
    wide: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    eps: float,
) -> Callable[..., list[mx.array]]:
    cuda = mx.cuda.is_available()
    header, body = sources(fragments, wide, eps, cuda=cuda)
    make: Any = mx.fast.cuda_kernel if cuda else mx.fast.metal_kernel
    return make(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous=False,
    )


def _by_rows(
    name: str,
    fragments: tuple[str, ...],
    rows: Mapping[str, mx.array],
    vectors: Mapping[str, mx.array],
    outputs: tuple[str, ...],
    eps: float = 0.0,
) -> list[mx.array]:
    """Run a kernel whose groups of threads have one row of D channels each."""
    x = rows["x"]
    B, L, D = x.shape
    run = _run(x.dtype)
    threads = threads_of(D, run)
    conditions = [
        "D % N == 0",
        *(f"is_wide<N>({name}, {name}_strides, 3)" for name in rows),
        *(f"is_wide<N>({name}, {name}_strides, 2)" for name in vectors),
    ]
    kernel = _kernel(name, fragments, " && ".join(conditions), (*rows, *vectors), outputs, eps)
    return kernel(
        inputs=[*rows.values(), *(mx.broadcast_to(each, (B, D)) for each in vectors.values())],
        template=[("T", x.dtype), ("D", D), ("N", run), ("THREADS", threads)],
        grid=(threads * L, B, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape] * len(outputs),
        output_dtypes=[x.dtype] * len(outputs),
    )


@cache
def _norm_modulate(eps: float) -> Any:
    def fused(x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
        fragments, vectors = (READ_ROW, NORM_MODULATE), {"shift": shift, "scale": scale}
        return _by_rows("norm_modulate", fragments, {"x": x}, vectors, ("normed",), eps)[0]

    def plain(x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
        return _plain_norm(partial(_layer_norm, eps), x, shift, scale)

    return _with_gradient(fused, plain)


@cache
def _add_gated() -> Any:
    def fused(x: mx.array, y: mx.array, gate: mx.array) -> mx.array:
        fragments, rows = (READ_ROW, ADD_GATED), {"x": x, "y": y}
        return _by_rows("add_gated", fragments, rows, {"gate": gate}, ("total",))[0]

    return _with_gradient(fused, _plain_sum)


@cache
def _add_norm_modulate(eps: float) -> Any:
    def fused(
        x: mx.array, y: mx.array, gate: mx.array, shift: mx.array, scale: mx.array
    ) -> tuple[mx.array, ...]:
        fragments, rows = (READ_ROW, ADD_GATED, NORM_MODULATE), {"x": x, "y": y}
        vectors = {"gate": gate, "shift": shift, "scale": scale}
        outputs = "total", "normed"
        return tuple(_by_rows("add_norm_modulate", fragments, rows, vectors, outputs, eps))

    def plain(
        x: mx.array, y: mx.array, gate: mx.array, shift: mx.array, scale: mx.array
    ) -> tuple[mx.array, ...]:
        total = _plain_sum(x, y, gate)
        return total, _plain_norm(partial(_layer_norm, eps), total, shift, scale)

    return _with_gradient(fused, plain)


@cache
def _gelu_tanh() -> Any:
    def fused(x: mx.array) -> mx.array:
        return _by_rows("gelu_tanh", (READ_ROW, GELU_TANH), {"x": x}, {}, ("out",))[0]

    return _with_gradient(fused, _plain_gelu)


@cache
def _group_norm(groups: int, eps: float, silu: bool) -> Any:
    def fused(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        shape, run = x.shape, _run(x.dtype)
        B, C = shape[0], shape[-1]
        x = mx.contiguous(x.reshape(B, -1, C))
        columns = -(-C // run)
        rows = max(256 // columns, 1)  # positions at a time
        blocks = max(min(-(-x.shape[1] // (4 * rows)), GROUP_BLOCKS // B), 1)
        options = mx.array([groups, rows, int(silu)], mx.int32)
        launch = {
            "template": [("T", x.dtype), ("N", run), ("THREADS", GROUP_THREADS)],
            "grid": (columns * rows * blocks, B, 1),
            "threadgroup": (columns * rows, 1, 1),
        }
        wide = "x_shape[2] % N == 0 && reinterpret_cast<size_t>(x) % 16 == 0"
        sums = _kernel("group_sums", (GROUP, GROUP_SUMS), wide, ("x", "options"), ("parts",), 0.0)
        (parts,) = sums(
            inputs=[x, options],
            output_shapes=[(B, blocks, groups, 2)],
            output_dtypes=[mx.float32],
            **launch,
        )
        inputs = "x", "options", "sums", "weight", "bias"
        for name in ("weight", "bias"):
            wide += f" && reinterpret_cast<size_t>({name}) % 16 == 0"
        apply = _kernel("group_apply", (GROUP, GROUP_APPLY), wide, inputs, ("out",), eps)
        (out,) = apply(
            inputs=[x, options, parts.sum(axis=1), mx.contiguous(weight), mx.contiguous(bias)],
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
            **launch,
        )
        return out.reshape(shape)

    return _with_gradient(fused, partial(_plain_group_norm, groups, eps, silu))


def _layer_norm(eps: float, x: mx.array) -> mx.array:
    return mx.fast.layer_norm(x, None, None, eps)


def _with_gradient(fused: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """MLX cannot differentiate a kernel: the gradient is that of the plain form."""
    function = mx.custom_function(fused)

    def gradient(primals: Any, cotangents: Any, outputs: Any) -> Any:
        primals = list(primals) if isinstance(primals, list | tuple) else [primals]
        many = isinstance(cotangents, list | tuple)
        _, gradients = mx.vjp(plain, primals, list(cotangents) if many else [cotangents])
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    function.vjp(gradient)
    return function
