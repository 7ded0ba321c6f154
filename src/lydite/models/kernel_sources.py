"""The source of the kernels: one body for CUDA and Metal, made of fragments.

The plain form of each kernel, its definition, is in `kernels.py`.
"""

from collections.abc import Sequence

# What a body is written in, for each kind of device. `N` values are a run of 16 bytes; beyond the
# width values are 0. The wide forms need aligned runs: a CUDA kernel holds its body twice.
CUDA_HEADER = """
#define SHARED __shared__
#define BARRIER __syncthreads()
template <int N, typename T>
__device__ inline void load(const T* row, int64_t stride, int first, int width, float* values) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    values[k] = first + k < width ? static_cast<float>(row[(first + k) * stride]) : 0.0f;
}
template <int N, typename T>
__device__ inline void load_wide(const T* row, int64_t, int first, int width, float* values) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (first < width) bits = __ldg(reinterpret_cast<const uint4*>(row + first));
  const T* run = reinterpret_cast<const T*>(&bits);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = static_cast<float>(run[k]);
}
template <int N, typename T>
__device__ inline void store(T* row, int first, int width, const float* values) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (first + k < width) row[first + k] = static_cast<T>(values[k]);
}
template <int N, typename T>
__device__ inline void store_wide(T* row, int first, int width, const float* values) {
  uint4 bits;
  T* run = reinterpret_cast<T*>(&bits);
#pragma unroll
  for (int k = 0; k < N; ++k) run[k] = static_cast<T>(values[k]);
  if (first < width) *reinterpret_cast<uint4*>(row + first) = bits;
}
template <int N, typename T, typename S>
__device__ inline bool is_wide(const T* start, const S& strides, int axes) {
  bool wide = reinterpret_cast<size_t>(start) % 16 == 0 && strides[axes - 1] == 1;
  for (int axis = 0; axis < axes - 1; ++axis) wide = wide && strides[axis] % N == 0;
  return wide;
}
template <typename T>
__device__ inline float sigmoid(float value) {  // in few instructions where T keeps few digits
  if (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-value));
  return 1.0f / (1.0f + expf(-value));
}
template <int WARPS>
__device__ inline float sum_over_group(float value, float* shared, int lane) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (WARPS == 1) return value;
  if (lane % 32 == 0) shared[lane / 32] = value;
  BARRIER;
  value = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) value += shared[warp];
  return value;
}
"""
CUDA_INDEX = """
  const int lane = threadIdx.x, token = blockIdx.x, batch = blockIdx.y, length = gridDim.x;
"""
METAL_HEADER = """
#define SHARED threadgroup
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
template <int N, typename P>
inline void load(P row, int64_t stride, int first, int width, thread float* values) {
  for (int k = 0; k < N; ++k)
    values[k] = first + k < width ? static_cast<float>(row[(first + k) * stride]) : 0.0f;
}
template <int N, typename T>
inline void store(device T* row, int first, int width, thread const float* values) {
  for (int k = 0; k < N; ++k)
    if (first + k < width) row[first + k] = static_cast<T>(values[k]);
}
template <typename T>
inline float sigmoid(float value) {
  return 1.0f / (1.0f + exp(-value));
}
template <int WARPS>
inline float sum_over_group(float value, threadgroup float* shared, int lane) {
  value = simd_sum(value);
  if (WARPS == 1) return value;
  if (lane % 32 == 0) shared[lane / 32] = value;
  BARRIER;
  value = 0.0f;
  for (int warp = 0; warp < WARPS; ++warp) value += shared[warp];
  return value;
}
"""
METAL_INDEX = """
  const int lane = thread_position_in_threadgroup.x, token = threadgroup_position_in_grid.x;
  const int batch = threadgroup_position_in_grid.y, length = threadgroups_per_grid.x;
"""

# A group of THREADS threads has one row of D channels.
READ_ROW = """
  constexpr int COUNT = (D + N * THREADS - 1) / (N * THREADS);
  const int64_t row = (int64_t(batch) * length + token) * D;
  float values[COUNT * N];
  for (int piece = 0; piece < COUNT; ++piece) {
    const int first = (piece * THREADS + lane) * N;
    load<N>(x + batch * x_strides[0] + token * x_strides[1], x_strides[2], first, D,
            &values[piece * N]);
  }
"""
ADD_GATED = """
  float branch[COUNT * N], gates[COUNT * N];
  for (int piece = 0; piece < COUNT; ++piece) {
    const int first = (piece * THREADS + lane) * N;
    load<N>(y + batch * y_strides[0] + token * y_strides[1], y_strides[2], first, D,
            &branch[piece * N]);
    load<N>(gate + batch * gate_strides[0], gate_strides[1], first, D, &gates[piece * N]);
  }
  for (int k = 0; k < COUNT * N; ++k) {
    const float value = values[k] + branch[k] * gates[k];
    values[k] = static_cast<float>(static_cast<T>(value));
  }
  for (int piece = 0; piece < COUNT; ++piece)
    store<N>(total + row, (piece * THREADS + lane) * N, D, &values[piece * N]);
"""
NORM_MODULATE = """
  constexpr int WARPS = THREADS / 32;
  SHARED float sums[WARPS];
  SHARED float squares[WARPS];
  float scales[COUNT * N], shifts[COUNT * N];
  for (int piece = 0; piece < COUNT; ++piece) {
    const int first = (piece * THREADS + lane) * N;
    load<N>(scale + batch * scale_strides[0], scale_strides[1], first, D, &scales[piece * N]);
    load<N>(shift + batch * shift_strides[0], shift_strides[1], first, D, &shifts[piece * N]);
  }
  float part = 0.0f;
  for (int k = 0; k < COUNT * N; ++k) part += values[k];
  const float mean = sum_over_group<WARPS>(part, sums, lane) / D;
  part = 0.0f;
  for (int k = 0; k < COUNT * N; ++k) {
    const float away = values[k] - mean;
    const int channel = (k / N * THREADS + lane) * N + k % N;
    part += channel < D ? away * away : 0.0f;
  }
  const float inverse = 1.0f / sqrt(sum_over_group<WARPS>(part, squares, lane) / D + EPS);
  for (int k = 0; k < COUNT * N; ++k) {
    const float normal = (values[k] - mean) * inverse;
    values[k] = normal * (1.0f + scales[k]) + shifts[k];
  }
  for (int piece = 0; piece < COUNT; ++piece)
    store<N>(normed + row, (piece * THREADS + lane) * N, D, &values[piece * N]);
"""
GELU_TANH = """
  for (int k = 0; k < COUNT * N; ++k) {
    const float slope = 1.5957691216f + 0.0713548162726f * (values[k] * values[k]);
    values[k] = values[k] * sigmoid<T>(values[k] * slope);
  }
  for (int piece = 0; piece < COUNT; ++piece)
    store<N>(out + row, (piece * THREADS + lane) * N, D, &values[piece * N]);
"""

# Group norm of (B, positions, C). A group of threads has some positions at a time, each thread N
# channels of one. `options` are the number of groups, of positions at a time, and whether SiLU
# follows. Sums are of differences to a value of the group, so that a large mean costs no digits.
GROUP = """
  const int positions = x_shape[1], C = x_shape[2];
  const int size = C / options[0], columns = (C + N - 1) / N, rows = options[1];
  const int first = lane % columns * N;
  float origins[N];
  for (int k = 0; k < N; ++k) {
    const int channel = first + k < C ? first + k : 0;
    origins[k] = static_cast<float>(x[int64_t(batch) * positions * C + channel / size * size]);
  }
"""
GROUP_SUMS = """
  SHARED float sums[THREADS * N];
  SHARED float squares[THREADS * N];
  float values[N], sum[N], square[N];
  for (int k = 0; k < N; ++k) sum[k] = square[k] = 0.0f;
  for (int at = token * rows + lane / columns; at < positions; at += length * rows) {
    load<N>(x + (int64_t(batch) * positions + at) * C, 1, first, C, values);
    for (int k = 0; k < N; ++k) {
      const float away = values[k] - origins[k];
      sum[k] += away;
      square[k] += away * away;
    }
  }
  for (int k = 0; k < N; ++k) {
    sums[lane * N + k] = sum[k];
    squares[lane * N + k] = square[k];
  }
  BARRIER;
  for (int group = lane; group < options[0]; group += rows * columns) {
    float total = 0.0f, spread = 0.0f;
    for (int row = 0; row < rows; ++row) {
      for (int channel = group * size; channel < (group + 1) * size; ++channel) {
        total += sums[row * columns * N + channel];
        spread += squares[row * columns * N + channel];
      }
    }
    const int64_t place = ((int64_t(batch) * length + token) * options[0] + group) * 2;
    parts[place] = total;
    parts[place + 1] = spread;
  }
"""
GROUP_APPLY = """
  float values[N], means[N], factors[N], offsets[N];
  load<N>(weight, 1, first, C, factors);
  load<N>(bias, 1, first, C, offsets);
  for (int k = 0; k < N; ++k) {
    const int group = batch * options[0] + (first + k < C ? first + k : 0) / size;
    const float count = float(positions) * size;
    const float away = sums[group * 2] / count;
    const float spread = sums[group * 2 + 1] / count - away * away;
    means[k] = origins[k] + away;
    factors[k] = factors[k] / sqrt((spread > 0.0f ? spread : 0.0f) + EPS);
  }
  for (int at = token * rows + lane / columns; at < positions; at += length * rows) {
    const int64_t start = (int64_t(batch) * positions + at) * C;
    load<N>(x + start, 1, first, C, values);
    for (int k = 0; k < N; ++k) {
      const float value = (values[k] - means[k]) * factors[k] + offsets[k];
      values[k] = options[2] ? value * sigmoid<T>(value) : value;
    }
    store<N>(out + start, first, C, values);
  }
"""


def sources(fragments: Sequence[str], wide: str, eps: float, *, cuda: bool) -> tuple[str, str]:
    """Header and body of a kernel; `wide` says when the wide form may be used."""
    body = "".join(fragments).replace("EPS", f"{eps!r}f")
    if not cuda:
        return METAL_HEADER, METAL_INDEX + body
    aligned = body.replace("load<", "load_wide<").replace("store<", "store_wide<")
    return CUDA_HEADER, f"{CUDA_INDEX}  if ({wide}) {{{aligned}  }} else {{{body}  }}\n"
