// SPDX-License-Identifier: Apache-2.0
//
// Sparse MLA decode on B200 and B300: what kernel.cu computes, with tcgen05 and accumulators in tensor memory. It has never run.
//
// One form for all numbers of heads, with rows and latent values as M and 16, 32 or 64 heads as N: Sᵀ = K · Qᵀ [64 rows, heads],
// Oᵀ = Vᵀ · Pᵀ [4 × 128 latent values, heads]. A block has one query token, up to 64 of its heads and a run of tiles of 64 rows. Of its
// 17 warps (which leave 96 registers a thread)
//
//   0 …  7  weigh: softmax, half of the heads each warpgroup; S from tensor memory, P to shared memory, O rescaled where a maximum
//           has grown; at the end they write the output
//   8 … 15  produce: gather rows a tile ahead, decode, store into one of two tiles, as on Hopper
//   16      issues all products: S of the next tile before O of this one, so that softmax is beside a product
//
// Derived, nothing measured: cycles of a multiprocessor for a tile of 64 rows of 352 bytes. 148 of them at 1.85 GHz; 8 TB/s are 29
// bytes a cycle, 2.25 PFLOP/s of dense bf16 8192 FLOPs, taken as half of that with M 64; shared memory is taken as 128 bytes.
//
//                                            64 heads             16 heads
//   device memory, 22.5 KB                   771                  771
//   tensor cores: S, M 64, 36 steps          36 × 32 = 1152       36 × 8 = 288
//                 O, M 128, 4 × 4 steps      16 × 32 = 512        16 × 8 = 128
//   shared memory: tile written in bf16      576                  576
//                 operands of S              36 × (16 + 16) = 1152   36 × (16 + 4) = 720
//                 operands of O              16 × (32 + 16) = 768    16 × (32 + 4) = 576
//                 P written, two bytes each  128                  32
//                 together, the bound        2624                 1904
//
// Tensor memory, 512 columns × 128 lanes × 4 bytes: O of 64 heads takes 256 columns, S twice 64. With heads as M, O of 64 heads would
// be M 64: half of the lanes of all 512 columns, at half the rate. O of 128 heads would need all columns alone: they are two blocks.
// Shared memory, 232448 bytes: Q 73728, two tiles 147456, P 8192, the rest 1608, and 1024 to start at a multiple of 1024.
//
// Compiled once for each width of a row, NUMINOUS_WIDTH. With NUMINOUS_DEBUG=1, block 0 writes its first K tile, S and P to `debug`.

#include "layout_sm100.cuh"
#ifdef NUMINOUS_MODEL  // the tests' model of a block of threads on the CPU
#include NUMINOUS_MODEL
#else
#include "sm100.cuh"
#endif
#include "common.cuh"

namespace numinous {

constexpr int kProducerGroups = 2;
constexpr int kIssuer = kConsumers + 128 * kProducerGroups;  // first thread of the warp that issues products
constexpr int kThreads = kIssuer + 32;
constexpr int kOneWarpgroup = 1;  // names of barriers: this and the next; 0 is __syncthreads

// Addresses of barriers in shared memory.
struct Barriers {
  uint32_t full, empty, scored;  // two each, for the two tiles
  uint32_t weighed;              // P of a tile is written, its S read, O as large as it has to be
  uint32_t asked;                // Q is there

  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : full(at), empty(at + 16), scored(at + 32), weighed(at + 48), asked(at + 56) {}
};

// --- Producers ----------------------------------------------------------------------------------------------------------------

// As in kernel.cu: rows are under way in registers while the tile before is in use.
template <class R>
__device__ __forceinline__ void produce(const Params& p, const Work& w, int group, uint32_t tiles, float* bias,
                                        const Barriers& barriers) {
  static_assert(kTile == kRowsOfPass * kProducerGroups, "a thread has a quarter of one row");
  const int thread = threadIdx.x % 128, quarter = producer_quarter(thread), row = producer_row(thread, group, kProducerGroups, 0);
  Raw<R> raw;
  Entry next = entry_of(p, w, w.begin, row);
  raw.fetch(p, slot_of(p, next, row), quarter);
  next = entry_of(p, w, w.begin + 1, row);
  for (int tile = w.begin; tile < w.end; ++tile) {
    const int turn = tile - w.begin, buffer = turn & 1;
    barrier_wait(barriers.empty + 8 * buffer, (turn >> 1 & 1) ^ 1);
    decode(raw, tiles + buffer * R::kTileBytes, row, quarter);
    if (quarter == 0) bias[buffer * kTile + row] = raw.valid ? 0.0f : -kInf;
    // The fence may wait for loads that are under way, and so would whoever waits for the tile.
    fence_for_mma();
    barrier_arrive(barriers.full + 8 * buffer);
    raw.fetch(p, slot_of(p, next, row), quarter);
    next = entry_of(p, w, tile + 2, row);
  }
}

// --- Products -----------------------------------------------------------------------------------------------------------------

// Of one warp, which waits together; one thread issues.
template <class R, int kHeads>
__device__ __forceinline__ void multiply(const Work& w, uint32_t base, uint32_t tensor, const Barriers& barriers) {
  using S = TensorBlockPlan<R, kHeads>;
  using T = TensorPlan<kHeads>;
  constexpr uint32_t kScore = instruction_of(kTile, kHeads, false), kWeigh = instruction_of(kOutRows, kHeads, true);
  const uint64_t q_at = tcgen05_descriptor(base + S::kQ, 16, kGroupBytes), p_at = tcgen05_descriptor(base + S::kP, 16, kGroupBytes);
  const uint64_t k_at = tcgen05_descriptor(base + S::kTiles, 16, kGroupBytes);
  const uint64_t v_at = tcgen05_descriptor(base + S::kTiles, kTilePanelBytes, kGroupBytes);
  const int turns = w.end - w.begin;
  barrier_wait(barriers.asked, 0);
  for (int turn = 0; turn <= turns; ++turn) {
    if (turn < turns) {
      const int buffer = turn & 1;
      barrier_wait(barriers.full + 8 * buffer, turn >> 1 & 1);
      fence_after_sync();
      if (elected()) {
#pragma unroll 4  // not all: descriptors of Q would be kept in registers over all tiles
        for (int step = 0; step < R::kPanels * 4; ++step)
          mma(tensor + T::kScores + buffer * kHeads, further(k_at, buffer * R::kTileBytes + k_major_step(kTile, 0, step)),
              further(q_at, k_major_step(kHeads, 0, step)), kScore, step > 0);
        mma_commit(barriers.scored + 8 * buffer);
      }
    }
    if (turn > 0) {
      const int buffer = (turn - 1) & 1;
      barrier_wait(barriers.weighed, (turn - 1) & 1);
      fence_after_sync();
      if (elected()) {
#pragma unroll 1
        for (int part = 0; part < kOutParts; ++part)
#pragma unroll
          for (int step = 0; step < kTile / 16; ++step)
            mma(tensor + T::kOut + part * kHeads,
                further(v_at, buffer * R::kTileBytes + mn_major_step(part * kPanelsOfPart, step)),
                further(p_at, k_major_step(kHeads, 0, step)), kWeigh, turn > 1 || step > 0);
        mma_commit(barriers.empty + 8 * buffer);
      }
    }
  }
}

// --- Softmax ------------------------------------------------------------------------------------------------------------------

#ifdef NUMINOUS_DEBUG
constexpr int kDebugS = kTile * 576, kDebugP = kDebugS + 64 * kTile;  // debug: K [64][576], S [64 heads][64], P [64 heads][64]
#define NUMINOUS_DUMP(statement) \
  if (p.debug != nullptr && blockIdx.x == 0 && turn == 0) { statement; }
#else
#define NUMINOUS_DUMP(statement)
#endif

// A thread has kMine / 4 heads in a fragment [64 rows, kMine heads]. Head `c` of them is the column of register c / 2 × 4 + c % 2, and
// of the register two further, 8 rows below.
__device__ __forceinline__ int own_head(int i) { return i / 4 * 2 + i % 2; }  // of register i
__device__ __forceinline__ int head_of(int thread, int c) { return fragment_column(thread, c / 2 * 4 + c % 2); }

// What the lanes of a warp have of each head, for one of `kMine` heads.
template <int kColumns>
__device__ __forceinline__ float of_head(const float (&x)[kColumns], int head) {
  return __shfl_sync(~0u, x[head / 8 * 2 + head % 2], head % 8 / 2);
}

// Maxima or sums of each head over the rows of a warp.
template <bool kMax, int kColumns>
__device__ __forceinline__ void over_lanes(float (&x)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      const float other = __shfl_xor_sync(~0u, x[c], lanes);
      x[c] = kMax ? fmaxf(x[c], other) : x[c] + other;
    }
}

// The same over the warps of a warpgroup, by way of `stat` [warp][kHeads].
template <int kHeads, bool kMax, int kColumns>
__device__ __forceinline__ void over_warps(float (&x)[kColumns], float* stat, int thread, int barrier) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (thread % 32 < 4) stat[thread / 32 * kHeads + head_of(thread, c)] = x[c];
  named_barrier(barrier, 128);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x[c] = stat[head_of(thread, c)];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) {
      const float other = stat[warp * kHeads + head_of(thread, c)];
      x[c] = kMax ? fmaxf(x[c], other) : x[c] + other;
    }
  }
}

// From Q to the output's stage.
template <class R, int kHeads>
__device__ __forceinline__ void weigh(const Params& p, const Work& w, uint8_t* shared, uint32_t tensor, const Barriers& barriers) {
  using S = TensorBlockPlan<R, kHeads>;
  using T = TensorPlan<kHeads>;
  constexpr int kMine = kHeads / 2, kRegisters = kMine / 2, kColumns = kMine / 4;  // heads of the warpgroup; of a thread's fragment
  constexpr int kAtOnce = kMine < 16 ? kMine : 16;  // heads of O in registers
  const int thread = threadIdx.x % 128, warp = uniform(thread / 32), group = uniform(threadIdx.x / 128);
  const uint32_t base = shared_address(shared);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);
  float* stat = reinterpret_cast<float*>(shared + S::kStat) + group * kMine;
  const uint32_t out = quarter_at(tensor + T::kOut + group * kMine, warp);
  const uint32_t scores = quarter_at(tensor + T::kScores + group * kMine, warp);

  load_q<R, kHeads>(p, w, base + S::kQ);
  fence_for_mma();
  barrier_arrive(barriers.asked);

  float most[kColumns], sum[kColumns];  // sums of own rows only
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    most[c] = -kInf;
    sum[c] = 0.0f;
  }

  const int turns = w.end - w.begin;
  for (int turn = 0; turn < turns; ++turn) {
    const int buffer = turn & 1;
    barrier_wait(barriers.full + 8 * buffer, turn >> 1 & 1);  // the bias is no product's
    barrier_wait(barriers.scored + 8 * buffer, turn >> 1 & 1);
    fence_after_sync();
    float s[kRegisters];  // [64 rows, kMine heads]
    load_fragment(s, scores + buffer * kHeads);
    wait_for_loads(s);

    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) top[c] = -kInf;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      s[i] = biased(s[i], bias[buffer * kTile + fragment_row(thread, i)]);
      top[own_head(i)] = fmaxf(top[own_head(i)], s[i]);
    }
    over_lanes<true>(top);
    if (turn > 0) barrier_wait(barriers.weighed, (turn - 1) & 1);  // maxima of the tile before are read
    over_warps<kHeads, true>(top, stat, thread, kOneWarpgroup + group);

    bool same = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      top[c] = fmaxf(most[c], top[c]);
      same = same && top[c] == most[c];
    }
    if (turn > 0) {  // P of the tile before is read, and O holds all tiles before
      barrier_wait(barriers.empty + 8 * (buffer ^ 1), (turn - 1) >> 1 & 1);
      fence_after_sync();
    }
    if (__any_sync(~0u, !same)) {
      float alpha[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        alpha[c] = top[c] == most[c] ? 1.0f : exp2_fast(most[c] * p.scale_log2 - exponent_of(p, top[c]));
        most[c] = top[c];
        sum[c] *= alpha[c];
      }
      if (turn > 0) {
#pragma unroll
        for (int first = 0; first < kMine; first += kAtOnce) {
          float by[kAtOnce];
#pragma unroll
          for (int head = 0; head < kAtOnce; ++head) by[head] = of_head(alpha, first + head);
#pragma unroll
          for (int part = 0; part < kOutParts; ++part) {
            float o[kAtOnce];  // of one latent value
            load_lanes(o, out + part * kHeads + first);
            wait_for_loads(o);
#pragma unroll
            for (int head = 0; head < kAtOnce; ++head) o[head] *= by[head];
            store_lanes(out + part * kHeads + first, o);
          }
        }
        wait_for_stores();
      }
    }
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const float weight = exp2_fast(s[i] * p.scale_log2 - exponent_of(p, most[own_head(i)]));
      sum[own_head(i)] += weight;
      store_shared(base + S::kP + swizzled(kHeads, group * kMine + fragment_column(thread, i), fragment_row(thread, i)),
                   uint16_t(bf16_pair(weight, 0.0f)));
      NUMINOUS_DUMP(const int at = (group * kMine + fragment_column(thread, i)) * kTile + fragment_row(thread, i);
                    p.debug[kDebugS + at] = s[i]; p.debug[kDebugP + at] = weight)
    }
    NUMINOUS_DUMP(for (int row = threadIdx.x; row < kTile; row += kConsumers) for (int at = 0; at < R::kPanels * 64; ++at)
        p.debug[row * 576 + dim_of_position(R::kFourBit && at < kLatent, at)] = bf16_value(
            *reinterpret_cast<const uint16_t*>(shared + S::kTiles + swizzled(kTile, row, at))))
    fence_for_mma();
    fence_before_sync();
    barrier_arrive(barriers.weighed);
  }

  over_lanes<false>(sum);
  if (turns > 0) {
    barrier_wait(barriers.weighed, (turns - 1) & 1);  // maxima are read
    barrier_wait(barriers.empty + 8 * ((turns - 1) & 1), (turns - 1) >> 1 & 1);  // O is whole, and all tiles are read
    fence_after_sync();
  }
  over_warps<kHeads, false>(sum, stat, thread, kOneWarpgroup + group);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    sum[c] = finish(p, w, group * kMine + head_of(thread, c), most[c], sum[c], thread < 4);
  float* stage = reinterpret_cast<float*>(shared + S::kStage) + group * kMine * kStageStride;
#pragma unroll
  for (int first = 0; first < kMine; first += kAtOnce) {
    float by[kAtOnce];
#pragma unroll
    for (int head = 0; head < kAtOnce; ++head) by[head] = of_head(sum, first + head);
#pragma unroll
    for (int part = 0; part < kOutParts; ++part) {
      const int dim = dim_of_position(R::kFourBit, part * kOutRows + thread);
      float o[kAtOnce];
      if (turns > 0) {  // else there is nothing, and what lies there may be NaN
        load_lanes(o, out + part * kHeads + first);
        wait_for_loads(o);
      }
#pragma unroll
      for (int head = 0; head < kAtOnce; ++head)
        stage[(first + head) * kStageStride + dim] = turns > 0 ? o[head] * by[head] : 0.0f;
    }
  }
  fence_before_sync();
}

// --- Kernels ------------------------------------------------------------------------------------------------------------------

template <class R, int kHeads>
__device__ __forceinline__ void attend(const Params& p) {
  using S = TensorBlockPlan<R, kHeads>;
  uint8_t* shared = dynamic_shared();
  shared += (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const Barriers barriers(base + S::kBarriers);
  const Work w = work_of(p, kHeads);
  if (p.whole < p.tokens) start_next_grid();  // `combine` may start when all blocks have come here; it waits for their end

  if (no_part(p, w, kHeads)) return;
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(barriers.full + 8 * buffer, 128 * kProducerGroups);
      barrier_init(barriers.empty + 8 * buffer, 1);
      barrier_init(barriers.scored + 8 * buffer, 1);
    }
    barrier_init(barriers.weighed, kConsumers);
    barrier_init(barriers.asked, kConsumers);
    fence_after_init();
  }
  if (threadIdx.x >= kIssuer) {
    tensor_memory_take(base + S::kAddress, TensorPlan<kHeads>::kColumns);
    fence_before_sync();
  }
  __syncthreads();
  fence_after_sync();
  const uint32_t tensor = uniform(*reinterpret_cast<const int*>(shared + S::kAddress));

  if (threadIdx.x < kConsumers) {
    weigh<R, kHeads>(p, w, shared, tensor, barriers);
  } else if (threadIdx.x < kIssuer) {
    produce<R>(p, w, (threadIdx.x - kConsumers) / 128, base + S::kTiles, reinterpret_cast<float*>(shared + S::kBias), barriers);
  } else {
    multiply<R, kHeads>(w, base, tensor, barriers);
  }
  __syncthreads();  // the output's stage is written, and tensor memory read
  if (threadIdx.x < kConsumers) {
    store_output(p, w, reinterpret_cast<const float*>(shared + S::kStage), kHeads);
  } else if (threadIdx.x >= kIssuer) {
    fence_after_sync();
    tensor_memory_give_back(tensor, TensorPlan<kHeads>::kColumns);
  }
}

}  // namespace numinous

#define NUMINOUS_KERNEL(heads)                                                                       \
  extern "C" __global__ void __launch_bounds__(numinous::kThreads, 1)                                \
      heads_##heads(const __grid_constant__ numinous::Params p) {                                    \
    numinous::attend<numinous::Row<NUMINOUS_WIDTH>, heads>(p);                                       \
  }

NUMINOUS_KERNEL(64)
NUMINOUS_KERNEL(32)
NUMINOUS_KERNEL(16)
