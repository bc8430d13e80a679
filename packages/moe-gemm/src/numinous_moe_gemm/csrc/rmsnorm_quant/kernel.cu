// SPDX-License-Identifier: Apache-2.0
//
// Fused RMSNorm + FP8 (E4M3FN) quantisation, bit for bit what these two kernels give one after the other:
//
//   1. the norm of FlashInfer 0.6.18 (CuTe DSL), which SGLang 0.5.20 calls: order of summation, one rounding to bf16;
//   2. SGLang 0.5.20's per_token_group_quant (compiled with fast math), group 128, or its static per-tensor quantisation.
//
// A row is cut into 16-byte vectors. Virtual thread t of T = 32, 64 or 128 owns the vectors t, t + T, t + 2T, …; its sum of
// squares runs through their elements in order as one FMA chain, then a butterfly 1, 2, 4, 8, 16 over the warp, then over the
// warps of the row. That order is the norm's, and the bits of the result depend on it.
//
// Two schedules, same arithmetic (two more, for sm_90a and two hidden sizes, are in hopper.cuh):
//   stream   many rows: a block of 128 threads walks over rows. Weights lie in shared memory in fp32, the next row is under way
//            while this one is worked on. Bound by memory; counted in instructions, because those come next.
//   single   few rows: a block holds one row, a thread one or two vectors. Little code: with a cold cache its fetch counts.
//
// Nothing is stored to global memory before griddepcontrol.wait, not even zeros into the padding of the scales: the
// allocator gives out memory in stream order, so the kernel ahead may still read what lay there. The weights are asked for
// before it, so the kernel ahead may not write them; ptxas 13.0 for sm_90a moves these loads behind the wait.

#include "instructions.cuh"

namespace {

constexpr int kVec = 8;                // elements in 16 bytes
constexpr int kGroup = 128;            // elements that share a scale
constexpr int kLanes = kGroup / kVec;  // threads that hold a group
constexpr float kMax = 448.0f;         // largest E4M3FN
constexpr float kFloor = 1e-10f;       // smallest amax that a scale is made from

struct Params {
  const __nv_bfloat16* x;
  __nv_bfloat16* residual;
  const __nv_bfloat16* weight;
  uint8_t* q;
  void* scale;
  const float* static_scale;                              // non-null: one scale for all, none is written
  __nv_bfloat16* y;                                       // may be null, may be x
  int64_t x_stride, residual_stride, q_stride, y_stride;  // elements from row to row
  int64_t scale_token_stride, scale_group_stride;         // elements of the scale tensor
  int rows, padded_rows, hidden, threads_per_row;
  float eps, weight_bias;
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// --- Norm -----------------------------------------------------------------------------------------------------------

// Elements of one vector, the residual added; `added` is the sum rounded to bf16.
template <bool kAdd>
__device__ __forceinline__ void unpack(const uint4& x, const uint4& r, float (&h)[kVec], uint4& added) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[2 * i] = low(word(x, i));
    h[2 * i + 1] = high(word(x, i));
    if constexpr (kAdd) {
      h[2 * i] = __fadd_rn(h[2 * i], low(word(r, i)));
      h[2 * i + 1] = __fadd_rn(h[2 * i + 1], high(word(r, i)));
      pairs[i] = bf16_pair(h[2 * i], h[2 * i + 1]);
    }
  }
  if constexpr (kAdd) added = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ __forceinline__ void accumulate(float& sum, const float (&h)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum = __fmaf_rn(h[i], h[i], sum);
}

__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, offset));
  return sum;
}

__device__ __forceinline__ float row_sum(const float* partial, int warps) {  // of 1, 2 or 4 warps
  if (warps == 1) return partial[0];
  const float sum = __fadd_rn(partial[0], partial[1]);
  return warps == 2 ? sum : __fadd_rn(sum, __fadd_rn(partial[2], partial[3]));
}

__device__ __forceinline__ float reciprocal_root(float sum, int hidden, float eps) {
  return rsqrt_approx_ftz(__fadd_rn(eps, __fdiv_rn(sum, static_cast<float>(hidden))));
}

// y of one vector, rounded to bf16; `w` has the bias added.
__device__ __forceinline__ uint4 normed(const float (&h)[kVec], float rstd, const float (&w)[kVec]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = bf16_pair(__fmul_rn(__fmul_rn(rstd, h[2 * i]), w[2 * i]),
                         __fmul_rn(__fmul_rn(rstd, h[2 * i + 1]), w[2 * i + 1]));
  return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ __forceinline__ void weights_of(const uint4& packed, float bias, float (&w)[kVec]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[2 * i] = __fadd_rn(low(word(packed, i)), bias);
    w[2 * i + 1] = __fadd_rn(high(word(packed, i)), bias);
  }
}

// --- Quantisation ---------------------------------------------------------------------------------------------------

// |largest| of two vectors' groups, one in either half. `kNan`: NaN if there is one, else NaN is passed over. `kExact`: the
// sign is dropped by the maxima themselves.
template <bool kNan, bool kExact>
__device__ __forceinline__ uint32_t group_amax(const uint4& first, const uint4& second) {
  uint32_t most[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint4& y = j == 0 ? first : second;
    if constexpr (kExact)
      most[j] = max_magnitude_pair<kNan>(max_magnitude_pair<kNan>(y.x, y.y), max_magnitude_pair<kNan>(y.z, y.w)) &
                0x7fff7fffu;
    else
      most[j] = max_pair<kNan>(max_pair<kNan>(y.x & 0x7fff7fffu, y.y & 0x7fff7fffu),
                               max_pair<kNan>(y.z & 0x7fff7fffu, y.w & 0x7fff7fffu));
  }
  uint32_t both = max_pair<kNan>(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2)
    both = max_pair<kNan>(both, __shfl_xor_sync(kAll, both, offset));
  return both;
}

__device__ __forceinline__ uint32_t ue8m0_ceil(float raw) {
  const uint32_t bits = __float_as_uint(raw);
  return ((bits >> 23) & 0xff) + ((bits & 0x7fffff) != 0);
}

// Codes of one vector. `kFinite`: no element is inf or NaN, so that the conversion's saturation is all the clamp there is.
template <bool kUe8m0, bool kFinite>
__device__ __forceinline__ uint2 codes_of(const uint4& y, float amax, float inverse, bool is_static) {
  float v[kVec];
  if constexpr (kUe8m0) {
    const float factor = __uint_as_float((254u - ue8m0_ceil(mul_ftz(amax, 1.0f / kMax))) << 23);
    const uint32_t factor2 = bf16_pair(factor, factor), most = bf16_pair(kMax, kMax);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A power of two times bf16 is exact. The minimum turns NaN and +inf into 448, the conversion -inf into -448.
      const uint32_t pair = scaled_pair<!kFinite>(word(y, i), factor2, most);
      v[2 * i] = low(pair);
      v[2 * i + 1] = high(pair);
    }
  } else {
    const float factor = is_static ? inverse : div_approx_ftz(kMax, amax);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      v[i] = mul_ftz(i % 2 ? high(word(y, i / 2)) : low(word(y, i / 2)), factor);
      if constexpr (!kFinite) v[i] = fminf(is_static ? fmaxf(v[i], -kMax) : v[i], kMax);
    }
  }
  return uint2{e4m3_four(v[0], v[1], v[2], v[3]), e4m3_four(v[4], v[5], v[6], v[7])};
}

// Where a row's results go.
struct Row {
  uint8_t* q;
  __nv_bfloat16* y;  // null: not asked for
  void* scale;       // of group 0; null: one scale for all
};

__device__ __forceinline__ Row row_of(const Params& p, int64_t row) {
  Row out;
  out.q = p.q + row * p.q_stride;
  out.y = p.y == nullptr ? nullptr : p.y + row * p.y_stride;
  // Packed scales are addressed by the byte, four to an element of the tensor.
  const int64_t offset = row * p.scale_token_stride * 4;
  out.scale = p.scale == nullptr ? nullptr : static_cast<uint8_t*>(p.scale) + offset;
  return out;
}

template <bool kUe8m0>
__device__ __forceinline__ void store_scale(const Params& p, void* scale, int group, float raw) {
  if constexpr (kUe8m0) {
    uint8_t* four = static_cast<uint8_t*>(scale) + (group / 4) * p.scale_group_stride * 4;
    four[group % 4] = ue8m0_ceil(raw);
    if (group == p.hidden / kGroup - 1)
      for (int tail = group % 4 + 1; tail < 4; ++tail) four[tail] = 0;
  } else {
    static_cast<float*>(scale)[group * p.scale_group_stride] = raw;
  }
}

// Padding rows of a scale tensor are 0.
template <bool kUe8m0>
__device__ __forceinline__ void clear_scales(const Params& p, int64_t row, int thread, int threads) {
  if (p.scale == nullptr) return;
  int* const at = static_cast<int*>(p.scale) + row * p.scale_token_stride;
  const int groups = p.hidden / kGroup, elements = kUe8m0 ? (groups + 3) / 4 : groups;
  for (int i = thread; i < elements; i += threads) at[i * p.scale_group_stride] = 0;
}

// Quantises and stores the vectors y[0 … n) of a thread, the first at `column`, the next `span` further on. All lanes of a
// warp take part; vectors beyond the row are there in the arithmetic and not in the stores. `kExact`: none is beyond it.
template <bool kUe8m0, bool kFinite, bool kExact, int n>
__device__ __forceinline__ void store_codes(const Params& p, const uint4 (&y)[n], const uint32_t (&amax2)[(n + 1) / 2],
                                            const Row& row, int column, int span, float inverse) {
  static_assert(n <= kLanes);
  const bool is_static = p.static_scale != nullptr;
  const int lane = threadIdx.x % kLanes;
  float mine = 0.0f;  // of the n vectors' amax: lane k keeps and stores that of vector k, one store for all
  uint32_t pair = 0;  // `kExact`: two of them, to be taken apart once
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const int at = column + k * span;
    const float amax = fmaxf(k % 2 ? high(amax2[k / 2]) : low(amax2[k / 2]), kFloor);
    if (!kExact && lane == k) mine = amax;
    if (kExact && lane / 2 == k / 2) pair = amax2[k / 2];
    const uint2 codes = codes_of<kUe8m0, kFinite>(y[k], amax, inverse, is_static);
    if (kExact || at < p.hidden) {
      *reinterpret_cast<uint2*>(row.q + at) = codes;
      if (!kExact && row.y != nullptr) *reinterpret_cast<uint4*>(row.y + at) = y[k];
    }
  }
  if constexpr (kExact) {
    mine = fmaxf(lane % 2 ? high(pair) : low(pair), kFloor);
    if (row.y != nullptr) {
#pragma unroll
      for (int k = 0; k < n; ++k) *reinterpret_cast<uint4*>(row.y + column + k * span) = y[k];
    }
  }
  const int group = (column + lane * span) / kGroup;
  if (row.scale != nullptr && lane < n && (kExact || group < p.hidden / kGroup))
    store_scale<kUe8m0>(p, row.scale, group, mul_ftz(mine, 1.0f / kMax));
}

// `kVote`: NaN and inf are rare, so a warp without one takes the way without clamps. More code, fewer instructions.
template <bool kUe8m0, bool kVote, bool kExact, int n>
__device__ __forceinline__ void finish(const Params& p, const uint4 (&y)[n], const Row& row, int column, int span,
                                       float inverse) {
  uint32_t amax2[(n + 1) / 2] = {};
  if (p.static_scale != nullptr) {
    store_codes<kUe8m0, false, kExact>(p, y, amax2, row, column, span, inverse);
    return;
  }
  if constexpr (kVote) {
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < n; k += 2) {
      amax2[k / 2] = group_amax<true, kExact>(y[k], k + 1 < n ? y[k + 1] : uint4{});
      most = max_pair<true>(most, amax2[k / 2]);
    }
    if (!__any_sync(kAll, (most & 0x7fff) >= 0x7f80 || (most >> 16) >= 0x7f80)) {
      store_codes<kUe8m0, true, kExact>(p, y, amax2, row, column, span, inverse);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < n; k += 2) amax2[k / 2] = group_amax<false, kExact>(y[k], k + 1 < n ? y[k + 1] : uint4{});
  store_codes<kUe8m0, false, kExact>(p, y, amax2, row, column, span, inverse);
}

__device__ __forceinline__ float inverse_of(const Params& p) {
  return p.static_scale == nullptr ? 0.0f : div_full(1.0f, *p.static_scale);
}

// Dynamic shared memory under the names of two schedules.
extern __shared__ float4 weights[];
extern __shared__ float4 row_values[];

// --- Many rows ------------------------------------------------------------------------------------------------------

constexpr int kStreamThreads = 128;

// Dynamic shared memory: the weights in fp32, first halves of all vectors, then second halves (no bank conflicts); then the
// vectors of the row under way, in places that only their thread reads and writes.
template <int kWidth, int kVectors, bool kAdd, bool kUe8m0>
__device__ __forceinline__ void stream(const Params& p) {
  constexpr int kThreads = kStreamThreads, kRows = kThreads / kWidth, kWarps = kWidth / 32;
  constexpr int kSpan = kWidth * kVec;  // elements from a thread's vector to its next
  __shared__ float partial[2][kThreads / 32];
  const int lane = threadIdx.x % kWidth, halves = p.hidden / kVec;
  const int start = lane * kVec;  // column of the first vector
  uint4* const stage = reinterpret_cast<uint4*>(weights + 2 * halves) + threadIdx.x;

  // Under way before the kernel ahead has ended: the weights do not depend on it.
  constexpr int kFill = (kVectors * kWidth + kThreads - 1) / kThreads;
  uint4 packed[kFill];
#pragma unroll
  for (int i = 0; i < kFill; ++i) {
    const int v = threadIdx.x + i * kThreads;
    packed[i] = v < halves ? load_constant(p.weight + v * kVec) : uint4{};
  }
  wait_for_kernel_ahead();
  const float inverse = inverse_of(p);

  auto fetch = [&](int64_t row) {
    const __nv_bfloat16* from = p.x + row * p.x_stride + start;
    const __nv_bfloat16* residual = p.residual + row * p.residual_stride + start;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const bool inside = row < p.rows && k * kSpan + start < p.hidden;
      copy_async(stage + k * kThreads, inside ? from + k * kSpan : p.x, inside);
      if constexpr (kAdd) copy_async(stage + (kVectors + k) * kThreads, inside ? residual + k * kSpan : p.x, inside);
    }
    copy_async_commit();
  };

  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kWidth;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  fetch(first);
  let_next_start();
#pragma unroll
  for (int i = 0; i < kFill; ++i) {
    const int v = threadIdx.x + i * kThreads;
    float w[kVec];
    weights_of(packed[i], p.weight_bias, w);
    if (v < halves) {
      weights[v] = float4{w[0], w[1], w[2], w[3]};
      weights[v + halves] = float4{w[4], w[5], w[6], w[7]};
    }
  }

  // Rows of a block advance together, because the barrier is the block's.
  int turn = 0;
  for (int64_t row = first; row - threadIdx.x / kWidth < p.rows; row += step, turn ^= 1) {
    copy_async_wait();
    float h[kVectors][kVec], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      uint4 added;
      unpack<kAdd>(stage[k * kThreads], kAdd ? stage[(kVectors + k) * kThreads] : uint4{}, h[k], added);
      accumulate(sum, h[k]);
      if constexpr (kAdd)
        if (row < p.rows && k * kSpan + start < p.hidden)
          *reinterpret_cast<uint4*>(p.residual + row * p.residual_stride + start + k * kSpan) = added;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = sum;
    __syncthreads();
    sum = row_sum(&partial[turn][threadIdx.x / kWidth * kWarps], kWarps);
    // The places have been read: the sum behind the barrier was made of them.
    fetch(row + step);
    const float rstd = reciprocal_root(sum, p.hidden, p.eps);

    uint4 y[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = k * kWidth + lane;
      float4 a{}, b{};
      if (v < halves) a = weights[v], b = weights[v + halves];
      const float w[kVec] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      y[k] = normed(h[k], rstd, w);
    }
    if (row < p.rows) finish<kUe8m0, true, false>(p, y, row_of(p, row), start, kSpan, inverse);
  }
  if (blockIdx.x == 0)
    for (int64_t row = p.rows; row < p.padded_rows; ++row) clear_scales<kUe8m0>(p, row, threadIdx.x, kThreads);
}

// --- Few rows -------------------------------------------------------------------------------------------------------

constexpr int kSingleThreads = 1024;  // at most; threads_per_row * vectors of a thread, divided by kItems

// Dynamic shared memory: h of the row in fp32, first halves of all vectors, then second halves.
// Thread (k, t) = (threadIdx.x / T, threadIdx.x % T) holds the vectors k * kItems … of virtual thread t.
template <int kItems, bool kAdd, bool kUe8m0>
__device__ __forceinline__ void single(const Params& p) {
  __shared__ float partial[4];
  const int width = p.threads_per_row, halves = p.hidden / kVec;
  const int lane = threadIdx.x % width, first = threadIdx.x / width * kItems * width + lane;
  const int64_t row = blockIdx.x;

  uint4 packed[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int v = first + j * width;
    packed[j] = v < halves ? load_constant(p.weight + v * kVec) : uint4{};
  }
  wait_for_kernel_ahead();
  float h[kItems][kVec];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int v = first + j * width, column = v * kVec;
    const bool inside = v < halves;
    const uint4 x = inside ? load_streaming(p.x + row * p.x_stride + column) : uint4{};
    uint4 r{}, added;
    if (kAdd && inside) r = load_streaming(p.residual + row * p.residual_stride + column);
    unpack<kAdd>(x, r, h[j], added);
    if (kAdd && inside) *reinterpret_cast<uint4*>(p.residual + row * p.residual_stride + column) = added;
    if (v < halves) {
      row_values[v] = float4{h[j][0], h[j][1], h[j][2], h[j][3]};
      row_values[v + halves] = float4{h[j][4], h[j][5], h[j][6], h[j][7]};
    }
  }
  let_next_start();
  const float inverse = inverse_of(p);
  __syncthreads();

  if (threadIdx.x < width) {  // the virtual threads: whole warps
    float sum = 0.0f;
#pragma unroll 4
    for (int v = lane; v < halves; v += width) {
      const float4 a = row_values[v], b = row_values[v + halves];
      const float values[kVec] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      accumulate(sum, values);
    }
    sum = warp_sum(sum);
    if (lane % 32 == 0) partial[lane / 32] = sum;
  }
  __syncthreads();
  const float rstd = reciprocal_root(row_sum(partial, width / 32), p.hidden, p.eps);

  uint4 y[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    float w[kVec];
    weights_of(packed[j], p.weight_bias, w);
    y[j] = normed(h[j], rstd, w);
  }
  finish<kUe8m0, false, false>(p, y, row_of(p, row), first * kVec, width * kVec, inverse);
  if (row == 0)
    for (int64_t pad = p.rows; pad < p.padded_rows; ++pad) clear_scales<kUe8m0>(p, pad, threadIdx.x, blockDim.x);
}

}  // namespace

// --- Entries --------------------------------------------------------------------------------------------------------

#define VARIANTS(MAKE, name, ...)                 \
  MAKE(name, __VA_ARGS__, false, false)           \
  MAKE(name##_ue8m0, __VA_ARGS__, false, true)    \
  MAKE(name##_add, __VA_ARGS__, true, false)      \
  MAKE(name##_add_ue8m0, __VA_ARGS__, true, true)

// Blocks on a multiprocessor that leave no spills: three or four rows (or pairs, or fours of rows) are under way in each.
#define MAKE_STREAM(name, width, vectors, add, ue8m0)                                                       \
  extern "C" __global__ void __launch_bounds__(kStreamThreads, vectors > 8 ? 2 : add ? 3 : 4)               \
      name(const __grid_constant__ Params p) {                                                              \
    stream<width, vectors, add, ue8m0>(p);                                                                  \
  }
#define STREAM(width, vectors) VARIANTS(MAKE_STREAM, stream_##width##_##vectors, width, vectors)

#define MAKE_SINGLE(name, items, add, ue8m0)                                                              \
  extern "C" __global__ void __launch_bounds__(kSingleThreads) name(const __grid_constant__ Params p) {   \
    single<items, add, ue8m0>(p);                                                                         \
  }
#define SINGLE(items) VARIANTS(MAKE_SINGLE, single_##items, items)

#if defined(NUMINOUS_HOPPER)
#include "hopper.cuh"
#elif defined(NUMINOUS_MORE)  // hidden sizes other than about 4096, 7168 and 8192
STREAM(32, 4)
STREAM(32, 8)
STREAM(32, 12)
STREAM(64, 12)
STREAM(128, 12)
STREAM(128, 16)
SINGLE(2)
#else
STREAM(64, 8)
STREAM(128, 7)
STREAM(128, 8)
SINGLE(1)
#endif
