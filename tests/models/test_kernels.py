"""The kernels' own source, compiled for the CPU, against float64; and where they are used.

A thread of the CPU stands for each thread of a group. Only the headers differ from a GPU's.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.core.errors import ConfigError
from lydite.models import kernel_sources, kernels, layers
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.trace.mlx_capture import record_modules

HEADER = r"""
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
using std::sqrt; using std::exp;
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float value) {
    uint32_t wide; std::memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    uint32_t wide = uint32_t(bits) << 16; float value; std::memcpy(&value, &wide, 4); return value;
  }
};
#define SHARED static
static std::barrier<>* barrier;
#define BARRIER barrier->arrive_and_wait()
template <int N, typename T>
void load(const T* row, int64_t stride, int first, int width, float* values) {
  for (int k = 0; k < N; ++k) values[k] = first + k < width ? float(row[(first + k) * stride]) : 0;
}
template <int N, typename T>
void store(T* row, int first, int width, const float* values) {
  for (int k = 0; k < N; ++k) if (first + k < width) row[first + k] = T(values[k]);
}
template <typename T> float sigmoid(float value) { return 1 / (1 + exp(-value)); }
static float lanes[1024];
template <int WARPS> float sum_over_group(float value, float*, int lane) {
  lanes[lane] = value;
  BARRIER;
  value = 0;
  for (int each = 0; each < WARPS * 32; ++each) value += lanes[each];
  BARRIER;
  return value;
}
"""
TYPES = {
    mx.int32: "int",
    mx.float32: "float",
    mx.float16: "_Float16",
    mx.bfloat16: "bfloat16",
}
EPS = 1e-3  # so large that a wrong place of it is seen
Floats = NDArray[np.float64]


@dataclass
class Kernel:
    """One kernel as a function of the compiled library."""

    fragments: Sequence[str]
    dtype: mx.Dtype
    template: Mapping[str, int]
    inputs: Mapping[str, mx.array]
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
    grid: tuple[int, int]  # groups of threads along tokens, and batch

    def source(self, name: str) -> str:
        parameters = [
            f"const {TYPES[array.dtype]}* {each}, const int64_t* {each}_strides, "
            f"const int* {each}_shape"
            for each, array in self.inputs.items()
        ]
        parameters += [f"{TYPES[dtype]}* {each}" for each, (_, dtype) in self.outputs.items()]
        names = [f"{each}, {each}_strides, {each}_shape" for each in self.inputs]
        called = ", ".join([*names, *self.outputs])
        constants = "".join(
            f"  constexpr int {key} = {value};\n" for key, value in self.template.items()
        )
        _, body = kernel_sources.sources(self.fragments, "", EPS, cuda=False)
        tokens, batches = self.grid
        threads = self.template["THREADS"]
        return f"""
static void run_{name}(int lane, int token, int batch, int length, {", ".join(parameters)}) {{
  using T = {TYPES[self.dtype]};
{constants}{body.removeprefix(kernel_sources.METAL_INDEX)}
}}
extern "C" void {name}({", ".join(parameters)}) {{
  std::barrier<> all({threads});
  barrier = &all;
  std::vector<std::thread> group;
  for (int lane = 0; lane < {threads}; ++lane) group.emplace_back([=] {{
    for (int batch = 0; batch < {batches}; ++batch)
      for (int token = 0; token < {tokens}; ++token) {{
        run_{name}(lane, token, batch, {tokens}, {called});
        BARRIER;
      }}
  }});
  for (auto& each : group) each.join();
}}
"""

    def run(self, function: Callable[..., None]) -> list[Floats]:
        arguments: list[Any] = []
        for each, array in self.inputs.items():
            raw = _raw(array, strided="D" in self.template)
            if each in ("gate", "shift", "scale"):  # one row for all pictures, as `_by_rows` does
                raw = np.broadcast_to(raw, (self.grid[1], *raw.shape[1:]))
            strides = [stride // raw.itemsize for stride in raw.strides]
            arguments += [
                raw.ctypes.data_as(ctypes.c_void_p),
                (ctypes.c_int64 * raw.ndim)(*strides),
                (ctypes.c_int * raw.ndim)(*raw.shape),
            ]
        results = [_raw(mx.full(shape, mx.nan, dtype)) for shape, dtype in self.outputs.values()]
        function(*arguments, *(raw.ctypes.data_as(ctypes.c_void_p) for raw in results))
        return [
            _wide(mx.array(raw).view(dtype))
            for raw, (_, dtype) in zip(results, self.outputs.values(), strict=True)
        ]


def _raw(array: mx.array, *, strided: bool = False) -> Any:
    """As NumPy; `strided` with gaps between the rows and between the values."""
    raw = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    if not strided:
        return raw
    wide = np.zeros((*raw.shape[:-1], 2 * raw.shape[-1] + 3), raw.dtype)
    wide[..., 1 : 2 * raw.shape[-1] : 2] = raw
    return wide[..., 1 : 2 * raw.shape[-1] : 2]


def _wide(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _draw(dtype: mx.Dtype, *shape: int, seed: int) -> mx.array:
    normals = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return mx.array(normals + 0.5).astype(dtype)


def _row_kernel(kind: str, dtype: mx.Dtype, width: int, rows: int) -> Kernel:
    fragments, inputs, outputs = {
        "add_gated": (("READ_ROW", "ADD_GATED"), ("x", "y", "gate"), ("total",)),
        "norm_modulate": (("READ_ROW", "NORM_MODULATE"), ("x", "shift", "scale"), ("normed",)),
        "add_norm_modulate": (
            ("READ_ROW", "ADD_GATED", "NORM_MODULATE"),
            ("x", "y", "gate", "shift", "scale"),
            ("total", "normed"),
        ),
        "gelu_tanh": (("READ_ROW", "GELU_TANH"), ("x",), ("out",)),
    }[kind]
    shape = 2, 3, width
    arrays = {
        name: _draw(dtype, *(shape if name in "xy" else (rows, width)), seed=seed)
        for seed, name in enumerate(inputs)
    }
    run = 16 // dtype.size
    return Kernel(
        [getattr(kernels, name) for name in fragments],
        dtype,
        {"D": width, "N": run, "THREADS": kernels.threads_of(width, run)},
        arrays,
        dict.fromkeys(outputs, (shape, dtype)),
        (3, 2),
    )


GROUPS = 4


def _group_kernel(kind: str, dtype: mx.Dtype, width: int, silu: bool) -> Kernel:
    run, positions, blocks = 16 // dtype.size, 21, 3
    columns, rows = -(-width // run), 2
    x = _draw(dtype, 2, positions, width, seed=0) + mx.array(30.0, dtype)
    options = mx.array([GROUPS, rows, int(silu)], mx.int32)
    parts = ((2, blocks, GROUPS, 2), mx.float32)
    arrays = {"x": x, "options": options}
    if kind == "group_apply":
        arrays["sums"] = mx.zeros((2, GROUPS, 2))
        arrays |= {name: _draw(dtype, width, seed=5) for name in ("weight", "bias")}
    return Kernel(
        [
            kernel_sources.GROUP,
            kernel_sources.GROUP_SUMS if kind == "group_sums" else kernel_sources.GROUP_APPLY,
        ],
        dtype,
        {"N": run, "THREADS": columns * rows},
        arrays,
        {"parts": parts} if kind == "group_sums" else {"out": (x.shape, dtype)},
        (blocks, 2),
    )


# Kind, dtype, width, rows of the vectors: one for each picture, or one for all of them.
ROW_CASES = [
    ("add_norm_modulate", mx.float32, 96, 2),
    ("add_norm_modulate", mx.bfloat16, 777, 1),
    ("norm_modulate", mx.float16, 41, 2),
    ("add_gated", mx.float32, 33, 1),
    ("gelu_tanh", mx.float32, 52, 2),
]
GROUP_CASES = [(mx.float32, 24, True), (mx.bfloat16, 20, False)]
ROUNDING = {mx.float32: 1e-5, mx.float16: 2**-11, mx.bfloat16: 2**-8}  # once, at the end


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    built = {f"row_{index}": _row_kernel(*case) for index, case in enumerate(ROW_CASES)}
    for index, case in enumerate(GROUP_CASES):
        for kind in ("group_sums", "group_apply"):
            built[f"{kind}_{index}"] = _group_kernel(kind, *case)
    path = tmp_path_factory.mktemp("kernels") / "kernels.cpp"
    path.write_text(HEADER + "".join(each.source(name) for name, each in built.items()))
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", str(path)]
    subprocess.run([*command, "-o", str(path.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


@pytest.mark.parametrize("index", range(len(ROW_CASES)))
def test_kernels_of_rows_compute_the_plain_form(library: Any, index: int) -> None:
    kind, dtype, width, rows = ROW_CASES[index]
    kernel = _row_kernel(kind, dtype, width, rows)
    results = dict(zip(kernel.outputs, kernel.run(getattr(library, f"row_{index}")), strict=True))
    given = {name: _wide(array) for name, array in kernel.inputs.items()}
    expected: dict[str, Floats] = {}
    x = given["x"]
    if "gate" in given:
        expected["total"] = x + given["y"] * given["gate"][:, None]
        x = results["total"]  # what is written is what is normed
    if "shift" in given:
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)
        expected["normed"] = normed * (1 + given["scale"][:, None]) + given["shift"][:, None]
    if kind == "gelu_tanh":
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        expected["out"] = 0.5 * x * (1 + tanh)
    assert expected.keys() == results.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=1.01 * ROUNDING[dtype], atol=2e-5)


@pytest.mark.parametrize("index", range(len(GROUP_CASES)))
def test_group_norm_computes_the_plain_form(library: Any, index: int) -> None:
    dtype, width, silu = GROUP_CASES[index]
    (parts,) = _group_kernel("group_sums", *GROUP_CASES[index]).run(
        getattr(library, f"group_sums_{index}")
    )
    apply = _group_kernel("group_apply", *GROUP_CASES[index])
    given = {name: _wide(array) for name, array in apply.inputs.items() if name != "sums"}
    inputs = {**apply.inputs, "sums": mx.array(parts.sum(axis=1).astype(np.float32))}
    apply.inputs = inputs
    (out,) = apply.run(getattr(library, f"group_apply_{index}"))
    x = given["x"].reshape(2, -1, GROUPS, width // GROUPS)
    mean, spread = x.mean((1, 3), keepdims=True), x.var((1, 3), keepdims=True)
    y = ((x - mean) / np.sqrt(spread + EPS)).reshape(given["x"].shape)
    y = y * given["weight"] + given["bias"]
    y = y / (1 + np.exp(-y)) if silu else y
    np.testing.assert_allclose(out, y, rtol=1.01 * ROUNDING[dtype], atol=1e-4)


def test_bodies_are_the_same_on_both_kinds_of_device() -> None:
    fragments = (kernel_sources.READ_ROW, kernel_sources.ADD_GATED, kernel_sources.NORM_MODULATE)
    _, metal = kernel_sources.sources(fragments, "wide", 1e-6, cuda=False)
    _, cuda = kernel_sources.sources(fragments, "wide", 1e-6, cuda=True)
    body = metal.removeprefix(kernel_sources.METAL_INDEX)
    assert "EPS" not in body and cuda.count(body) == 1
    assert body.replace("load<", "load_wide<").replace("store<", "store_wide<") in cuda


# ---- where they are used ----------------------------------------------------------------------


def _plainly(name: str, *_: Any) -> Callable[..., list[mx.array]]:
    """In place of a kernel: its plain form."""

    def run(*, inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
        used.append(name)
        if name == "gelu_tanh":
            return [kernels._plain_gelu(*inputs)]
        total = inputs[0]
        if name != "norm_modulate":
            total = kernels._plain_sum(*inputs[:3])
        if name == "add_gated":
            return [total]
        normed = kernels._plain_norm(nn.LayerNorm(8, 1e-6, affine=False), total, *inputs[-2:])
        return [normed] if name == "norm_modulate" else [total, normed]

    return run


used: list[str] = []
CONFIG = MMDiTConfig(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    pooled_projection_dim=6,
    out_channels=4,
    pos_embed_max_size=8,
    dual_attention_layers=(0,),
)


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with plain forms in place of the kernels."""
    used.clear()
    monkeypatch.setenv("LYDITE_GPU_BRANCHES", "1")
    monkeypatch.setattr(kernels, "in_use", lambda: True)
    monkeypatch.setattr(kernels, "_kernel", _plainly)


def _mmdit() -> tuple[MMDiT, tuple[Any, ...]]:
    mx.random.seed(3)
    model = MMDiT(CONFIG)
    tables = model.modulation(mx.array([500.0]), mx.random.normal((2, 6)))
    tables = {path: table[0] for path, table in tables.items()}
    text = model.embed_text(mx.random.normal((2, 5, 12)))
    inputs = mx.random.normal((2, 8, 8, 4)), text, tables, model.positions(8, 8)
    mx.eval(model.parameters(), inputs)
    return model, inputs


def test_a_network_uses_them_compiled_or_not(switched_on: None) -> None:
    model, inputs = _mmdit()
    fused, compiled = model(*inputs), mx.compile(model)(*inputs)
    assert set(used) == {"norm_modulate", "add_norm_modulate", "add_gated", "gelu_tanh"}
    kernels.in_use = lambda: False
    plain = model(*inputs)
    assert mx.allclose(fused, plain, atol=1e-5) and mx.allclose(compiled, plain, atol=1e-5)


def test_a_recorded_network_calls_its_norms(switched_on: None) -> None:
    class Seen:
        def __init__(self) -> None:
            self.names: set[str] = set()

        def record(self, name: str, value: Any, *, slot: str) -> Any:
            self.names.add(name)
            return value

    model, inputs = _mmdit()
    with record_modules(Seen(), model, scope="net") as seen:
        model(*inputs)
    assert not {"norm_modulate", "add_norm_modulate"} & set(used)
    assert {"net/transformer_blocks.0.norm2", "net/norm_out.norm"} <= seen.names


def test_gradients_are_those_of_the_plain_form(switched_on: None) -> None:
    model, inputs = _mmdit()

    def loss(latent: mx.array) -> mx.array:
        return (model(latent, *inputs[1:]) ** 2).sum()

    fused = mx.grad(loss)(inputs[0])
    kernels.in_use = lambda: False
    assert mx.allclose(fused, mx.grad(loss)(inputs[0]), atol=1e-4)


def test_other_dtypes_and_shapes_take_the_plain_form(switched_on: None) -> None:
    norm, x = nn.LayerNorm(4, affine=False), mx.ones((2, 3, 4), mx.bfloat16)
    vector = mx.ones((2, 4))
    assert kernels.norm_modulate(norm, x, shift=vector, scale=vector).dtype == mx.float32
    assert kernels.add_gated(x[:, 0], x[:, 0], vector).shape == (2, 2, 4)
    weighted = nn.LayerNorm(4)
    kernels.norm_modulate(weighted, mx.ones((2, 3, 4)), shift=vector, scale=vector)
    assert not used


@pytest.mark.parametrize("cuda", [True, False])
def test_joined_weights_are_the_linears_own(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not cuda:
        request.getfixturevalue("on_the_cpu")
    model, inputs = _mmdit()
    before = model(*inputs)
    if cuda:
        monkeypatch.setenv("LYDITE_GPU_BRANCHES", "1")
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    layers.join_weights(model)
    attention: Any = model.transformer_blocks[0].attn
    names = ("to_q", "to_k", "to_v")
    joined = layers._Joined([attention[name] for name in names]).weight
    tokens = mx.ones((1, 3, joined.shape[1]))
    product = layers.joint_product(tokens, [attention[name] for name in names])
    assert product is not None and product.shape == (1, 3, len(joined))
    assert mx.allclose(model(*inputs), before, atol=1e-5)
    assert mx.array_equal(mx.concatenate([attention[name].weight for name in names]), joined)
    attention.to_k.weight = attention.to_k.weight * 2  # a weight that changes later is seen
    assert not mx.allclose(model(*inputs), before, atol=1e-3)


def test_they_are_compiled_while_weights_are_read(
    switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    monkeypatch.setattr(kernels, "_run_each", lambda width, dtype: widths.append(width))
    with kernels.compiled_meanwhile(16, mx.float32):
        pass
    monkeypatch.setattr(kernels, "in_use", lambda: False)
    with kernels.compiled_meanwhile(32, mx.float32):
        pass
    assert widths == [16]


@pytest.mark.parametrize(
    ("mode", "cuda", "expected"),
    [("auto", True, True), ("off", True, False), ("auto", False, False), ("on", False, True)],
)
def test_which_devices_use_them(
    mode: str, cuda: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, mode)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert not kernels.in_use()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    assert kernels.in_use() is expected


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "sometimes")
    with pytest.raises(ConfigError, match="LYDITE_KERNELS=sometimes"):
        kernels.in_use()
