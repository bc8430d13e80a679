// SPDX-License-Identifier: Apache-2.0
//
// Sparse MLA decode with the matrix products of a warp, for sm_120a (RTX PRO 6000, RTX 50): neither WGMMA nor tcgen05, and 99 KB of
// shared memory a block. Runs on sm_90a, too, where the tests prove it.
//
// A block has one query token, up to 16 or 32 of its heads, and a run of tiles of 64 rows (split-K). One tile lies in shared memory;
// its halves of 32 rows are filled and given back by turns.
//
//   producers   gather rows into registers, a tile ahead, decode them to bf16 and store a half, swizzled (`common.cuh`).
//   consumers   256 threads. S = Q · Kᵀ [heads, 32 rows]: warp w has rows 16 (w / 4) … and a quarter of the inner dimension, whose
//               fragments of Q stay in its registers. The four parts of S meet in shared memory, where each head's softmax is that of
//               8 or 16 consecutive lanes. O = P · V [heads, 512]: warp w has the 64 values of panel w.
//
// Why 32 heads and not 64, in cycles of a multiprocessor for 64 rows of 352 bytes (RTX PRO 6000: 188 multiprocessors at 2.6 GHz,
// 1.79 TB/s = 3.7 bytes a cycle each; mma.sync 1024 FLOPs and shared memory 128 bytes a cycle: the vendor's figures, nothing measured):
//
//                                              16 heads   32 heads   64 heads
//   device memory, 22.5 KB                         6150       6150       6150    once a token: its other blocks find rows in L2
//   mma.sync, 2 · heads · 64 · 1088 FLOPs          2176       4352       8704    twice that on RTX 50
//   shared memory: tile written, K, V read         1664       1664       1664
//     parts of S, P                                 400        800       1600
//   decoding by 4 warps, 987 instructions           990        990        990
//   bytes of registers: O, and Q twice             68 K      136 K      272 K    of 256 K
//   bytes of shared memory                         85 K       96 K      119 K    of 99 K
//
// Up to 32 heads memory bounds; 16 leave registers for a second warpgroup of producers. Beyond, products bound, with blocks of
// 32 as with more: decoding goes on beside them. Q in shared memory (72 K with 64 heads) would leave no room for a tile and the parts.
// A second tile has no room either, and a half by turns hides as much: rows under way wait in registers.
//
// Compiled once for each width of a row, NUMINOUS_WIDTH. With NUMINOUS_DEBUG=1, block 0 writes its first K tile, S and P to `debug`.

#include "layout.cuh"
#ifdef NUMINOUS_MODEL  // the tests' model of a block of threads on the CPU
#include NUMINOUS_MODEL
#else
#include "mma.cuh"
#endif
#include "common.cuh"

namespace numinous {

constexpr int kAllConsumers = 1;  // name of a barrier; 0 is __syncthreads
constexpr int kInnerParts = 4;    // of S: part i has steps i of each panel, 16 values each
constexpr int kPartStride = kHalf + 8;  // floats of a head of a part: fragments fall into different banks
constexpr int kPStride = 2 * kHalf + 16;  // bytes of a head of P: rows of a matrix do

// Shared memory of a block from a multiple of 1024 on.
template <class R, int kHeads>
struct MmaPlan {
  static constexpr int kParts = R::kTileBytes;  // the tile comes first
  static constexpr int kP = kParts + kInnerParts * kHeads * kPartStride * 4;
  static constexpr int kBias = kP + kHeads * kPStride;  // [64]: 0, or -inf for a row that is none
  static constexpr int kFactor = kBias + kTile * 4;     // [heads] by which O is multiplied
  static constexpr int kBarriers = kFactor + kHeads * 4;  // full[2], empty[2]
  static constexpr int kBytes = kBarriers + 4 * 8 + 1024;  // the last for the start
  // In place of the tile: Q before the first; with the parts, the output in fp32 [heads][kStageStride] after the last.
  static_assert(R::kPanels * kHeads * 128 <= R::kTileBytes && kHeads * kStageStride * 4 <= kP, "does not fit");
  static_assert(kBytes <= 101376, "more shared memory than a block of sm_120a can have");
};

__device__ __forceinline__ bool has_rows(const Work& w, int tile, int half) { return tile * kTile + half * kHalf < w.length; }

// --- Producers ----------------------------------------------------------------------------------------------------------------

// A warpgroup of `kGroups`: with two, each fills its half of every tile.
template <class R, int kGroups>
__device__ __forceinline__ void produce(const Params& p, const Work& w, int group, uint32_t tile_at, float* bias, uint32_t full,
                                        uint32_t empty) {
  static_assert(kRowsOfPass == kHalf, "a pass is a half");
  constexpr int kPasses = 2 / kGroups;
  const int thread = threadIdx.x % 128, quarter = producer_quarter(thread);
  Raw<R> raw[kPasses];
  Entry next[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) next[pass] = entry_of(p, w, w.begin, producer_row(thread, group, kGroups, pass));
  const auto fetch = [&](int pass, int after) {
    const int row = producer_row(thread, group, kGroups, pass);
    raw[pass].fetch(p, slot_of(p, next[pass], row), quarter);
    next[pass] = entry_of(p, w, after, row);
  };
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) fetch(pass, w.begin + 1);
  for (int tile = w.begin; tile < w.end; ++tile) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int half = pass * kGroups + group, row = producer_row(thread, group, kGroups, pass);
      if (!has_rows(w, tile, half)) break;
      barrier_wait(empty + 8 * half, tile - w.begin & 1);  // first for Q, which lies there
      decode(raw[pass], tile_at, row, quarter);
      if (quarter == 0) bias[row] = raw[pass].valid ? 0.0f : -kInf;
      barrier_arrive(full + 8 * half);
      fetch(pass, tile + 2);
    }
  }
}

// --- Consumers ----------------------------------------------------------------------------------------------------------------

#ifdef NUMINOUS_DEBUG
constexpr int kDebugS = kTile * 576, kDebugP = kDebugS + 64 * kTile;  // debug: K [64][576], S [64 heads][64], P [64 heads][64]

template <class R>
__device__ void dump_half(float* debug, const uint8_t* tile, int half) {
  for (int i = threadIdx.x; i < kHalf * R::kPanels * kPanelDims; i += kConsumers) {
    const int row = half * kHalf + i / (R::kPanels * kPanelDims), position = i % (R::kPanels * kPanelDims);
    const int dim = dim_of_position(R::kFourBit && position < kLatent, position);
    debug[row * 576 + dim] = bf16_value(*reinterpret_cast<const uint16_t*>(tile + swizzled(kTile, row, position)));
  }
}
#define NUMINOUS_DUMP(statement) \
  if (p.debug != nullptr && blockIdx.x == 0 && tile == w.begin) { statement; }
#else
#define NUMINOUS_DUMP(statement)
#endif

template <class R, int kHeads>
__device__ __forceinline__ void consume(const Params& p, const Work& w, uint8_t* shared) {
  using S = MmaPlan<R, kHeads>;
  constexpr int kM = kHeads / 16;                    // fragments of 16 heads
  constexpr int kRows = kHalf * kHeads / kConsumers, kLanes = kHalf / kRows;  // of a head's softmax: rows of a thread, lanes
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int inner = warp % kInnerParts, first_row = warp / kInnerParts * 16;  // in S
  const int own_head = threadIdx.x / kLanes, own_row = threadIdx.x % kLanes * kRows;  // in the softmax
  const uint32_t tile_at = shared_address(shared), full = tile_at + S::kBarriers, empty = full + 16;
  float* parts = reinterpret_cast<float*>(shared + S::kParts);
  float* factors = reinterpret_cast<float*>(shared + S::kFactor);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);

  load_q<R, kHeads>(p, w, tile_at);
  named_barrier(kAllConsumers, kConsumers);
  uint32_t q[kM][R::kPanels][4];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int panel = 0; panel < R::kPanels; ++panel)
      load_matrices<false>(q[m][panel], tile_at + swizzled(kHeads, 16 * m + lane % 16,
                                                           kPanelDims * panel + 16 * inner + lane / 16 * 8));
  warp_barrier();
  if (lane == 0)
    for (int half = 0; half < 2; ++half) barrier_arrive(empty + 8 * half);

  float o[kM][8][4];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
  float most = -kInf, sum = 0.0f;  // of own head; the sum of own rows only

  // Lanes' rows of K: two fragments of 8 rows and 16 values; of V: two of 16 rows and 8 values.
  const uint32_t k_at = tile_at + swizzled(kTile, first_row + lane / 16 * 8 + lane % 8, 16 * inner + lane / 8 % 2 * 8);
  const uint32_t v_at = tile_at + swizzled(kTile, lane % 16, kPanelDims * warp + lane / 16 * 8);
  const uint32_t p_at = tile_at + S::kP + lane % 16 * kPStride + lane / 16 * 16;

  for (int step = 0; step < 2 * (w.end - w.begin); ++step) {
    const int half = step & 1, tile = w.begin + (step >> 1);
    if (!has_rows(w, tile, half)) break;
    barrier_wait(full + 8 * half, step >> 1 & 1);
    NUMINOUS_DUMP(dump_half<R>(p.debug, shared, half))

    float s[kM][2][4] = {};
#pragma unroll
    for (int panel = 0; panel < R::kPanels; ++panel) {
      uint32_t k[4];
      load_matrices<false>(k, k_at + half * (kHalf * 128) + panel * kTilePanelBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma(s[m][n], q[m][panel], k[2 * n], k[2 * n + 1]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2 of heads, fragment i / 2 of rows
        const int head = 16 * m + i % 2 * 8 + lane / 4, row = first_row + i / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(parts + (inner * kHeads + head) * kPartStride + row) =
            float2{s[m][i / 2][i % 2 * 2], s[m][i / 2][i % 2 * 2 + 1]};
      }
    named_barrier(kAllConsumers, kConsumers);  // also: P and factors of the half before are read

    float x[kRows], top = -kInf;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = 0.0f;
#pragma unroll
      for (int part = 0; part < kInnerParts; ++part)
        x[i] += parts[(part * kHeads + own_head) * kPartStride + own_row + i];
      x[i] = biased(x[i], bias[half * kHalf + own_row + i]);
      top = fmaxf(top, x[i]);
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    const float now = fmaxf(most, top), by = exponent_of(p, now);
    // Not exp2 of the difference: that is contracted to an FMA and not 1 where the maximum stays.
    const float alpha = now == most ? 1.0f : exp2_fast(most * p.scale_log2 - by);
    most = now;
    sum *= alpha;
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      const float first = exp2_fast(x[i] * p.scale_log2 - by), second = exp2_fast(x[i + 1] * p.scale_log2 - by);
      sum += first + second;
      store_shared(tile_at + S::kP + own_head * kPStride + 2 * (own_row + i), bf16_pair(first, second));
      NUMINOUS_DUMP(for (int c = 0; c < 2; ++c) {
        const int at = own_head * kTile + half * kHalf + own_row + i + c;
        p.debug[kDebugS + at] = x[i + c];
        p.debug[kDebugP + at] = c == 0 ? first : second;
      })
    }
    if (own_row == 0) factors[own_head] = alpha;
    named_barrier(kAllConsumers, kConsumers);

    bool same = true;
    float by_head[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        by_head[m][r] = factors[16 * m + 8 * r + lane / 4];
        same = same && by_head[m][r] == 1.0f;
      }
    if (__any_sync(~0u, !same)) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][n][i] *= by_head[m][i / 2];
    }
#pragma unroll
    for (int k = 0; k < kHalf / 16; ++k) {
      uint32_t weights[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrices<false>(weights[m], p_at + 16 * m * kPStride + 32 * k);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t v[4];
        load_matrices<true>(v, (v_at ^ (32 * pair)) + (half * kHalf + 16 * k) * 128);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) mma(o[m][2 * pair + n], weights[m], v[2 * n], v[2 * n + 1]);
      }
    }
    warp_barrier();
    if (lane == 0) barrier_arrive(empty + 8 * half);
  }

#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  const float factor = finish(p, w, own_head, most, sum, own_row == 0);
  named_barrier(kAllConsumers, kConsumers);  // the tile and all factors are read
  if (own_row == 0) factors[own_head] = factor;
  named_barrier(kAllConsumers, kConsumers);
  float* stage = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 16 * m + i / 2 * 8 + lane / 4, position = kPanelDims * warp + 8 * n + lane % 4 * 2 + i % 2;
        stage[head * kStageStride + dim_of_position(R::kFourBit, position)] = o[m][n][i] * factors[head];
      }
  named_barrier(kAllConsumers, kConsumers);
  store_output(p, w, stage, kHeads);
}

// --- Kernels ------------------------------------------------------------------------------------------------------------------

// Threads 0 … 255 consume, the rest produce.
template <class R, int kHeads>
__device__ __forceinline__ void attend(const Params& p) {
  using S = MmaPlan<R, kHeads>;
  constexpr int kProducerGroups = kHeads == 16 ? 2 : 1;  // 32 heads leave no registers for a second
  // Of a thread. Two rows under way take 48 … 88 of a producer's; 3 × 168 and 4 × 128 are there.
  constexpr int kProducerRegisters = kHeads == 16 ? 112 : 104 + (R::kRope ? 16 : 0) + (R::kFourBit ? 0 : 16);
  constexpr int kConsumerRegisters = kHeads == 16 ? 144 : (3 * 168 - kProducerRegisters) / 2;
  uint8_t* shared = dynamic_shared();
  shared += (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared), full = base + S::kBarriers, empty = full + 16;
  const Work w = work_of(p, kHeads);
  if (p.whole < p.tokens) start_next_grid();  // `combine` may start when all blocks have come here; it waits for their end

  if (no_part(p, w, kHeads)) return;
  if (threadIdx.x == 0)
    for (int half = 0; half < 2; ++half) {
      barrier_init(full + 8 * half, 128);
      barrier_init(empty + 8 * half, kConsumers / 32);
    }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    produce<R, kProducerGroups>(p, w, (threadIdx.x - kConsumers) / 128, base, reinterpret_cast<float*>(shared + S::kBias), full,
                                empty);
  } else {
    more_registers<kConsumerRegisters>();
    consume<R, kHeads>(p, w, shared);
  }
}

}  // namespace numinous

#define NUMINOUS_KERNEL(name, threads, heads)                                                                   \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ numinous::Params p) {   \
    numinous::attend<numinous::Row<NUMINOUS_WIDTH>, heads>(p);                                                  \
  }

NUMINOUS_KERNEL(mma_16, 512, 16)
NUMINOUS_KERNEL(mma_32, 384, 32)
