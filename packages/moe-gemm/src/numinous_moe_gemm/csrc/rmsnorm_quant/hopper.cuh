// SPDX-License-Identifier: Apache-2.0
//
// Schedules of sm_90a for hidden sizes 4096 and 7168, which fill every vector of every thread, so that no load and no store asks whether
// it is inside the row. Same arithmetic as the others, from kernel.cu; when each is taken is said in kernels/rmsnorm_quant.py.
//
//   split  fewest rows: kParts blocks for a row. Each sums the whole row, and finishes a part of it.
//   ring   more rows: one block on each multiprocessor. Rows come into a ring of places in shared memory by bulk copies, so all memory
//          that there is holds rows under way; groups of T threads work on rows independently of each other.

namespace {

// --- Ring -----------------------------------------------------------------------------------------------------------

// Bytes of dynamic shared memory of a block; `RING_SHARED` of kernels/rmsnorm_quant.py has the same.
constexpr int kRingShared = 232448 - 1024;
constexpr int kRingThreads = 512;

// Dynamic shared memory: the weights as in stream, then places of a row (and its residual) each.
template <int kWidth, int kVectors, bool kAdd, bool kUe8m0>
__device__ __forceinline__ void ring(const Params& p) {
  constexpr int kThreads = kRingThreads, kGroups = kThreads / kWidth, kWarps = kWidth / 32;
  constexpr int kSpan = kWidth * kVec;  // elements from a thread's vector to its next
  constexpr int kRow = kWidth * kVectors;  // vectors of a row
  constexpr int kRowBytes = kRow * 16, kPlace = kAdd ? 2 * kRow : kRow;
  constexpr int kPlaces = (kRingShared - 2 * kRowBytes) / (16 * kPlace);
  static_assert(kGroups <= 16 && kPlaces <= 32);
  __shared__ uint64_t full[kPlaces];
  __shared__ int coming[kPlaces];  // row that a place was last asked for
  __shared__ float partial[2][kThreads / 32];
  uint4* const places = reinterpret_cast<uint4*>(weights + 2 * kRow);
  const int group = threadIdx.x / kWidth, lane = threadIdx.x % kWidth;
  const int start = lane * kVec;  // column of the first vector
  // Rows of this block: blockIdx.x, + gridDim.x, …; the grid has no more blocks than there are rows.
  const int mine = (p.rows - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
  auto row_at = [&](int i) { return static_cast<int64_t>(blockIdx.x) + static_cast<int64_t>(i) * gridDim.x; };
  auto request = [&](int i) {  // one thread, when nobody reads the place any more
    uint4* const to = places + i % kPlaces * kPlace;
    uint64_t* const barrier = full + i % kPlaces;
    arrivals_expect(barrier, kPlace * 16);
    copy_bulk(to, p.x + row_at(i) * p.x_stride, kRowBytes, barrier);
    if constexpr (kAdd) copy_bulk(to + kRow, p.residual + row_at(i) * p.residual_stride, kRowBytes, barrier);
    say(coming + i % kPlaces, i);
  };

  let_next_start();
  const int place = threadIdx.x;
  if (place < kPlaces) arrivals_start(full + place);
  constexpr int kFill = (kRow + kThreads - 1) / kThreads;
  uint4 packed[kFill];
#pragma unroll
  for (int i = 0; i < kFill; ++i) {
    const int v = threadIdx.x + i * kThreads;
    packed[i] = v < kRow ? load_constant(p.weight + v * kVec) : uint4{};
  }
  wait_for_kernel_ahead();
  if (place < kPlaces && place < mine) request(place);
  const float inverse = inverse_of(p);
#pragma unroll
  for (int i = 0; i < kFill; ++i) {
    const int v = threadIdx.x + i * kThreads;
    float w[kVec];
    weights_of(packed[i], p.weight_bias, w);
    if (v < kRow) {
      weights[v] = float4{w[0], w[1], w[2], w[3]};
      weights[v + kRow] = float4{w[4], w[5], w[6], w[7]};
    }
  }
  for (int64_t pad = p.rows + static_cast<int64_t>(blockIdx.x); pad < p.padded_rows; pad += gridDim.x)
    clear_scales<kUe8m0>(p, pad, threadIdx.x, kThreads);
  __syncthreads();

  int turn = 0;
  for (int i = group; i < mine; i += kGroups, turn ^= 1) {
    const int64_t row = row_at(i);
    const uint4* const from = places + i % kPlaces * kPlace + lane;
    // Two phases back looks like this one: a group that is ahead first sees that the row before it in this place has been read.
    wait_until_said(coming + i % kPlaces, i);
    arrivals_wait(full + i % kPlaces, i / kPlaces % 2);
    float h[kVectors][kVec], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      uint4 added;
      unpack<kAdd>(from[k * kWidth], kAdd ? from[kRow + k * kWidth] : uint4{}, h[k], added);
      accumulate(sum, h[k]);
      if constexpr (kAdd) *reinterpret_cast<uint4*>(p.residual + row * p.residual_stride + start + k * kSpan) = added;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = sum;
    sync_group<kWidth>(group);
    sum = row_sum(&partial[turn][group * kWarps], kWarps);
    // The place has been read: the sums behind the barrier were made of it.
    if (lane == 0 && i + kPlaces < mine) request(i + kPlaces);
    const float rstd = reciprocal_root(sum, kRow * kVec, p.eps);

    uint4 y[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const float4 a = weights[k * kWidth + lane], b = weights[k * kWidth + lane + kRow];
      const float w[kVec] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      y[k] = normed(h[k], rstd, w);
    }
    finish<kUe8m0, true, true>(p, y, row_of(p, row), start, kSpan, inverse);
  }
}

// --- Split ----------------------------------------------------------------------------------------------------------

constexpr int kParts = 4;  // `SPLIT_PARTS` of kernels/rmsnorm_quant.py

// Block (row, part): all threads hold and sum the whole row, and finish its vectors part * kOwn … of kVectors. Where a row is
// written that is read, the blocks of a row are a cluster: none writes before all have read.
template <int kWidth, int kVectors, bool kAdd, bool kUe8m0>
__device__ __forceinline__ void split(const Params& p) {
  constexpr int kOwn = (kVectors + kParts - 1) / kParts, kSpan = kWidth * kVec, kHidden = kSpan * kVectors;
  constexpr bool kExact = kVectors % kParts == 0;
  __shared__ float partial[kWidth / 32];
  const int64_t row = blockIdx.x / kParts;
  const int part = blockIdx.x % kParts, start = threadIdx.x * kVec, first = part * kOwn * kSpan + start;
  const bool in_place = kAdd || p.y == p.x;
  const __nv_bfloat16* const x = p.x + row * p.x_stride + start;
  __nv_bfloat16* const residual = p.residual + row * p.residual_stride + start;

  let_next_start();
  uint4 packed[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j)
    packed[j] = kExact || first + j * kSpan < kHidden ? load_constant(p.weight + first + j * kSpan) : uint4{};
  wait_for_kernel_ahead(x);
  if (row >= p.rows) {  // a padding row of the scales
    if (part == 0) clear_scales<kUe8m0>(p, row, threadIdx.x, kWidth);
    return;
  }

  uint4 all_x[kVectors], all_r[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    all_x[k] = load_streaming(x + k * kSpan);
    if constexpr (kAdd) all_r[k] = load_streaming(residual + k * kSpan);
  }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float h[kVec];
    uint4 added;
    unpack<kAdd>(all_x[k], all_r[k], h, added);
    accumulate(sum, h);
  }
  uint4 own_x[kOwn] = {}, own_r[kOwn] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (part == k / kOwn) own_x[k % kOwn] = all_x[k], own_r[k % kOwn] = all_r[k];
  const float inverse = inverse_of(p);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (in_place) cluster_arrive();
  const float rstd = reciprocal_root(row_sum(partial, kWidth / 32), kHidden, p.eps);

  uint4 y[kOwn], added[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    float h[kVec], w[kVec];
    unpack<kAdd>(own_x[j], own_r[j], h, added[j]);
    weights_of(packed[j], p.weight_bias, w);
    y[j] = normed(h, rstd, w);
  }
  if (in_place) cluster_wait();
  if constexpr (kAdd) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      if (kExact || first + j * kSpan < kHidden)
        *reinterpret_cast<uint4*>(residual + (part * kOwn + j) * kSpan) = added[j];
  }
  finish<kUe8m0, false, kExact>(p, y, row_of(p, row), first, kSpan, inverse);
}

}  // namespace

#define MAKE_RING(name, width, vectors, add, ue8m0)                                                               \
  extern "C" __global__ void __launch_bounds__(kRingThreads, 1) name(const __grid_constant__ Params p) {          \
    ring<width, vectors, add, ue8m0>(p);                                                                          \
  }
#define RING(width, vectors) VARIANTS(MAKE_RING, ring_##width##_##vectors, width, vectors)

#define MAKE_SPLIT(name, width, vectors, add, ue8m0)                                                              \
  extern "C" __global__ void __launch_bounds__(width) name(const __grid_constant__ Params p) {                    \
    split<width, vectors, add, ue8m0>(p);                                                                         \
  }
#define SPLIT(width, vectors) VARIANTS(MAKE_SPLIT, split_##width##_##vectors, width, vectors)

RING(64, 8)
RING(128, 7)
SPLIT(64, 8)
SPLIT(128, 7)
