// SPDX-License-Identifier: Apache-2.0
//
// Sparse MLA decode of 4-bit rows on Hopper, operands in registers: out = softmax(scale · q · Kᵀ) · V over the rows that a query names.
//
// A block has one query token, up to 64 of its heads, and a run of tiles of 64 rows (split-K). Rows lie in shared memory as they lie in the
// pool, in a ring of stages that a warpgroup of producers fills with asynchronous copies; it also turns block scales to bf16. Consumers
// decode what they read straight into the fragments of WGMMA's operand in registers, so nothing decoded goes through shared memory:
//
//   Sᵀ = K · Qᵀ [rows, heads]: a thread has 16 codes of each of two rows at a time, which are one block under one scale.
//   Oᵀ = Vᵀ · Pᵀ [latent, heads]: a thread has eight codes of each of four rows, the same latent values of two rows make a pair.
//
// Inner dimensions and rows of M have any order as long as both operands have the same: q, P and the output are stored accordingly.
// Two warpgroups have S and softmax of a tile by turns, half a period apart, and each half of the latent values in O of all tiles. So one
// is at softmax while the other multiplies. The largest score of a head is raised only where weights would become large, which is
// seldom behind the first tile; then sums and outputs are multiplied before the tile is added.
//
// `layout.cuh` has every address, `sm90.cuh` every instruction, docs/deep-dives/sparse-mla-decode.md (Version 5) the arithmetic.
// Compiled once for each width of a row, NUMINOUS_WIDTH. With NUMINOUS_DEBUG=1, block 0 writes its first K tile, S and P to `debug`.

#include "layout.cuh"
#ifdef NUMINOUS_MODEL  // the tests' model of a block of threads on the CPU
#include NUMINOUS_MODEL
#else
#include "sm90.cuh"
#endif
#include "common.cuh"
#include "join.cuh"

namespace numinous {

// Names of barriers; 0 is __syncthreads.
constexpr int kAllConsumers = 1, kOneWarpgroup = 2;
// Of a thread; 40 + 2 × 232 = 3 × 168.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
// A head without rows. Any score is far above it, and no score minus it is NaN.
constexpr float kNoScore = -3e38f;
// A thread's weights of a tile together: beyond it, the largest score is raised.
constexpr float kMostWeight = 4096.0f;

// A tile's stage and the parity of its turn in it.
struct Turn {
  int stage, parity;
  template <class S>
  static __device__ __forceinline__ Turn of(int turn) { return {turn % S::kCount, turn / S::kCount & 1}; }
};

// --- Producers ----------------------------------------------------------------------------------------------------------------

// A warp fills rows 16 · warp … of every tile, from its part of the list, and turns their block scales to bf16 when they are there.
template <class R, class S>
__device__ __forceinline__ void produce(const Params& p, const Work& w, uint32_t base) {
  constexpr int kChunks = R::kBytes / 16;
  const int warp = uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32, row = 16 * warp + lane % 16;
  const uint32_t full = base + S::kBarriers, empty = full + 8 * S::kCount;
  const int turns = w.end - w.begin;
  Entry ahead[S::kFlight + 2];  // of tiles whose copies are next
#pragma unroll
  for (int i = 0; i < S::kFlight + 2; ++i) ahead[i] = entry_of(p, w, w.begin + i, row);
  __syncthreads();  // barriers are made

  const auto copy = [&](int turn, Entry entry) {
    const Turn t = Turn::of<S>(turn);
    if (turn >= S::kCount) barrier_wait(empty + 8 * t.stage, t.parity ^ 1);
    const int64_t slot = slot_of(p, entry, row);
    const uint64_t at = slot >= 0 && slot < p.slots ? reinterpret_cast<uint64_t>(p.pool + slot * p.pool_stride) : 0;
    const uint32_t mask = __ballot_sync(~0u, at != 0) & 0xffff;
    if (lane == 0) store_shared(base + S::kMasks + 16 * t.stage + 4 * warp, mask);
#pragma unroll
    for (int four = 0; four < 4; ++four) {  // eight lanes a row
      const int from = 4 * four + lane / 8;
      const uint64_t one = uint64_t(__shfl_sync(~0u, uint32_t(at >> 32), from)) << 32 | __shfl_sync(~0u, uint32_t(at), from);
      const uint8_t* source = settled((one != 0 ? reinterpret_cast<const uint8_t*>(one) : p.pool) + 16 * (lane % 8));
      const uint32_t to = base + S::kStages + t.stage * S::kStageBytes + (16 * warp + from) * R::kBytes + 16 * (lane % 8);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 8)
        if (chunk + 8 <= kChunks || chunk + lane % 8 < kChunks) copy_of_row(to + 16 * chunk, source + 16 * chunk, one != 0);
    }
  };
#pragma unroll
  for (int turn = 0; turn < S::kFlight; ++turn) {
    if (turn < turns) copy(turn, ahead[turn]);
    commit_copies();
  }
  Entry next = ahead[S::kFlight], later = ahead[S::kFlight + 1];

  const int pair = lane % 8, eight = lane / 8;  // rows `pair` and 8 further, blocks 8 · eight …
  for (int turn = 0; turn < turns; ++turn) {
    const int stage = Turn::of<S>(turn).stage;
    const uint32_t rows = base + S::kStages + stage * S::kStageBytes;
    await_copies<S::kFlight - 1>();
    __syncwarp();
    const uint32_t from = rows + (16 * warp + pair) * R::kBytes + R::kScaleAt + 8 * eight;
    const uint2 upper = words_at(from), lower = words_at(from + 8 * R::kBytes);
    const uint32_t to = rows + S::kScales + 4 * (scale_line(8 * eight) + 8 * warp + scale_word(pair));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 scale = e4m3_values(__byte_perm(i < 4 ? upper.x : upper.y, i < 4 ? lower.x : lower.y, i % 4 | (4 + i % 4) << 4));
      store_shared(to + 4 * kScaleLine * i, bf16_pair(fabsf(scale.x) * kScaleUnit, fabsf(scale.y) * kScaleUnit));  // the sign is not its
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(full + 8 * stage);
    const Entry latest = entry_of(p, w, w.begin + turn + S::kFlight + 2, row);
    if (turn + S::kFlight < turns) copy(turn + S::kFlight, next);
    commit_copies();
    next = later;
    later = latest;
  }
}

// --- Consumers ----------------------------------------------------------------------------------------------------------------

#ifdef NUMINOUS_DEBUG
constexpr int kDebugS = kTile * 576, kDebugP = kDebugS + 64 * kTile;  // debug: K [64][576], S [64 heads][64], P [64 heads][64]
#define NUMINOUS_DUMP(first, statement) \
  if (p.debug != nullptr && blockIdx.x == 0 && first) { statement; }
#else
#define NUMINOUS_DUMP(first, statement)
#endif

// Heads of q into panels as `load_q` of common.cuh, in the order in which S takes the dimensions. Of 64 dimensions a thread's lane % 4 = t has
// 16 · t …; in step s its fragment has latent values s, s + 4 and s + 8, s + 12 of these, or rope values 4s … 4s + 3. So eight values that a
// lane loads here go to four words, 32 bytes apart, or 16.
template <class R, int kHeads>
__device__ __forceinline__ void load_q_packed(const Params& p, const Work& w, uint32_t to) {
  constexpr int kWarps = kConsumers / 32, kTurns = kHeads / kWarps, kChunks = R::kRope ? 3 : 2;
  static_assert(kWarps == 8 && kHeads % kWarps == 0, "heads of a warp have one swizzle");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 8 / 2, half = lane % 2;
  const uint16_t* q =
      p.q + w.request * p.q_request_stride + w.query * p.q_query_stride + (w.head + warp) * p.q_head_stride + 8 * lane;
  uint4 all[kTurns][kChunks];  // all loads under way at once
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const bool live = w.head + warp + turn * kWarps < p.heads;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      all[turn][k] = {0, 0, 0, 0};
      if (live && (k < 2 || lane < 8)) all[turn][k] = *reinterpret_cast<const uint4*>(q + k * kLatent / 2);
    }
    q += kWarps * p.q_head_stride;
  }
  // Addresses are one of eight and a constant, because code that runs once is paid for by the line: a warp's heads have one swizzle.
  const uint32_t first = to + lane / 8 * kHeads * 128 + warp * 128 + 4 * t, rope = to + kLatentPanels * kHeads * 128 + warp * 128 + 4 * t;
  uint32_t latent_at[4], rope_at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    latent_at[i] = first + ((2 * i + half) ^ warp) * 16;
    rope_at[i] = rope + ((4 * half + i) ^ warp) * 16;
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const uint4 v = all[turn][k];
      if (k < 2) {
        const uint32_t pairs[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                                   __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          store_shared(latent_at[i] + turn * kWarps * 128 + k * (kLatentPanels / 2) * kHeads * 128,
                       multiply_bf16_pairs(pairs[i], p.q_factor));
      } else if (lane < 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared(rope_at[i] + turn * kWarps * 128, word(v, i));
      }
    }
}

// Head of column `c` of a thread's fragments [64, heads].
__device__ __forceinline__ int head_of(int thread, int c) { return fragment_column(thread, c / 2 * 4 + c % 2); }

// Output or part of the block: `o` [latent of 64 × 4, heads] times a factor of each head. A thread has eight values side by side of a head.
template <int kHeads, bool kPart>
__device__ __forceinline__ void write_output(const Params& p, const Work& w, const float (&o)[4][kHeads / 2], const float* factors) {
  const int thread = threadIdx.x % 128, dim = threadIdx.x / 32 * 64 + threadIdx.x % 32 / 4 * 8;
  const int64_t first = (w.row_of(p, 0) + head_of(thread, 0)) * kLatent + dim;
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    const int apart = c / 2 * 8 + c % 2, head = head_of(thread, 0) + apart, i = c / 2 * 4 + c % 2;
    if (w.head + head >= p.heads) continue;
    const float by = factors[head];
    float v[8];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      v[tile] = o[tile][i] * by;
      v[tile + 4] = o[tile][i + 2] * by;
    }
    if (kPart) {
      *reinterpret_cast<float4*>(p.part_out + first + apart * kLatent) = float4{v[0], v[1], v[2], v[3]};
      *reinterpret_cast<float4*>(p.part_out + first + apart * kLatent + 4) = float4{v[4], v[5], v[6], v[7]};
    } else {
      *reinterpret_cast<uint4*>(p.out + first + apart * kLatent) =
          uint4{bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])};
    }
  }
}

// The same, as it is, to the stage of `join_cluster`. Lanes that store 16 bytes together have two times four heads eight banks apart: those in odd
// places have their upper four values first, which fall between.
template <int kHeads>
__device__ __forceinline__ void write_stage(float* stage, const float (&o)[4][kHeads / 2]) {
  const int thread = threadIdx.x % 128, dim = threadIdx.x / 32 * 64 + threadIdx.x % 32 / 4 * 8;
  const bool odd = threadIdx.x / 4 % 2 != 0;
  float* first = stage + head_of(thread, 0) * kStageStride + dim + (odd ? 4 : 0);
  float* second = stage + head_of(thread, 0) * kStageStride + dim + (odd ? 0 : 4);
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    const int at = (c / 2 * 8 + c % 2) * kStageStride, i = c / 2 * 4 + c % 2;
    float low[4], high[4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      low[tile] = odd ? o[tile][i + 2] : o[tile][i];
      high[tile] = odd ? o[tile][i] : o[tile][i + 2];
    }
    *reinterpret_cast<float4*>(first + at) = float4{low[0], low[1], low[2], low[3]};
    *reinterpret_cast<float4*>(second + at) = float4{high[0], high[1], high[2], high[3]};
  }
}

template <class R, int kHeads>
__device__ __forceinline__ void consume(const Params& p, const Work& w, uint8_t* shared) {
  using S = PackedPlan<R, kHeads>;
  constexpr int kRegisters = kHeads / 2, kColumns = kHeads / 4;  // of a fragment [64, heads]; heads that a thread has
  const int thread = threadIdx.x % 128, group = uniform(threadIdx.x / 128), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t base = shared_address(shared), full = base + S::kBarriers, empty = full + 8 * S::kCount,
                 weighed = empty + 8 * S::kCount;
  float* most = reinterpret_cast<float*>(shared + S::kMost);
  float* exponents = reinterpret_cast<float*>(shared + S::kBy);
  float* alphas = reinterpret_cast<float*>(shared + S::kAlpha);
  int* changed = reinterpret_cast<int*>(shared + S::kChanged);
  const uint64_t q_at = descriptor(base + S::kQ, 16, kGroupBytes);
  load_q_packed<R, kHeads>(p, w, base + S::kQ);
  fence_for_wgmma();
  named_barrier(kAllConsumers, kConsumers);

  float o[4][kRegisters];  // [64 latent values, heads] four times
  float sum[kColumns];     // of own tiles' rows, as far as the thread has them
#pragma unroll
  for (int tile = 0; tile < 4; ++tile)
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) o[tile][i] = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum[c] = 0.0f;
  uint32_t a[2][16];  // fragments: of products under way and of the next ones

  // Products of a tile's P with this warpgroup's half of V. Latent value 8 · word + i of the row is row `g` of tile i, or of tile i - 4 and eight
  // below; of 16 rows in a step, inner values 2t and 2t + 1 are rows t and t + 8, those 8 further are rows t + 4 and t + 12.
  const uint32_t my_words = base + S::kStages + t * R::kBytes + 4 * (32 * group + 8 * warp + g);
  const uint32_t my_scales = base + S::kStages + S::kScales + 4 * (scale_line(16 * group + 4 * warp + g / 2) + 2 * t);
  const auto multiply = [&](int turn) {
    const Turn at = Turn::of<S>(turn);
    const int buffer = turn & 1;
    barrier_wait(full + 8 * at.stage, at.parity);
    barrier_wait(weighed + 8 * buffer, turn >> 1 & 1);
    if (changed[buffer] != 0) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float alpha = alphas[buffer * kHeads + head_of(thread, c)];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          o[tile][c / 2 * 4 + c % 2] *= alpha;
          o[tile][c / 2 * 4 + c % 2 + 2] *= alpha;
        }
      }
    }
    const uint64_t p_at = descriptor(base + S::kP + buffer * S::kPBytes, 16, kGroupBytes);
    const uint32_t words = my_words + at.stage * S::kStageBytes, scales = my_scales + at.stage * S::kStageBytes;
    uint32_t next[4];
    uint2 by_next;
    const auto load = [&](int step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) next[i] = word_at(words + (16 * step + 4 * i) * R::kBytes);
      by_next = words_at(scales + 32 * step);
    };
    load(0);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) hold(o[tile]);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      const uint2 by = by_next;
      const uint32_t first[2] = {__byte_perm(next[0], next[2], 0x5410), __byte_perm(next[0], next[2], 0x7632)};
      const uint32_t second[2] = {__byte_perm(next[1], next[3], 0x5410), __byte_perm(next[1], next[3], 0x7632)};
      if (step + 1 < kTile / 16) load(step + 1);
      if (step >= 2) wgmma_wait<1>();
      uint32_t(&f)[16] = a[step % 2];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f[4 * tile + half] = multiply_bf16_pairs(e2m1_pair_by_product(first[half], tile), by.x);
          f[4 * tile + 2 + half] = multiply_bf16_pairs(e2m1_pair_by_product(second[half], tile), by.y);
        }
      wgmma_fence();
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
        wgmma_registers(o[tile], f + 4 * tile, further(p_at, k_major_step(kHeads, 0, step)), true);
      wgmma_commit();
    }
    wgmma_wait();
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) hold(o[tile]);
    if (lane == 0) barrier_arrive(empty + 8 * at.stage);  // its rows are read, and P is
  };

  // Sums so far are multiplied as a tile's maxima ask for.
  const auto rise = [&](int buffer) {
    if (changed[buffer] != 0) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] *= alphas[buffer * kHeads + head_of(thread, c)];
    }
  };

  const uint32_t my_row = base + S::kStages + (16 * warp + g) * R::kBytes;
  const uint32_t row_scales = base + S::kStages + S::kScales + 4 * (scale_line(t) + 8 * warp + scale_word(g));
  const int turns = w.end - w.begin;
  // Scores, weights and maxima of an own tile.
  const auto attend_to = [&](int turn) {
    const Turn at = Turn::of<S>(turn);
    const int buffer = group;
    barrier_wait(full + 8 * at.stage, at.parity);

    float s[kRegisters];  // [64 rows, heads]
    {
      const uint32_t row = my_row + at.stage * S::kStageBytes, scales = row_scales + at.stage * S::kStageBytes;
      uint2 next[2];
      uint32_t by_next;
      const auto load = [&](int run) {  // 64 dimensions
        next[0] = words_at(row + 32 * run + 8 * t);
        next[1] = words_at(row + 8 * R::kBytes + 32 * run + 8 * t);
        by_next = word_at(scales + 4 * (scale_line(4 * run) - scale_line(0)));
      };
      load(0);
#pragma unroll
      for (int run = 0; run < R::kPanels; ++run) {
        uint32_t(&f)[16] = a[run % 2];
        if (run < kLatentPanels) {
          const uint2 codes[2] = {next[0], next[1]};
          const uint32_t by[2] = {__byte_perm(by_next, by_next, 0x1010), __byte_perm(by_next, by_next, 0x3232)};
          if (run + 1 < kLatentPanels) load(run + 1);
          if (run >= 2) wgmma_wait<1>();
#pragma unroll
          for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              f[4 * step + half] = multiply_bf16_pairs(e2m1_pair_by_product(codes[half].x, step), by[half]);
              f[4 * step + 2 + half] = multiply_bf16_pairs(e2m1_pair_by_product(codes[half].y, step), by[half]);
            }
        } else {
          uint2 codes[2][2], steps[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t from = row + 8 * half * R::kBytes;
            codes[half][0] = words_at(from + R::kRopeAt + 16 * t);
            codes[half][1] = words_at(from + R::kRopeAt + 16 * t + 8);
            steps[half] = words_at(from + R::kScaleAt + 8 * t);
          }
          wgmma_wait<1>();
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t by = step_pair(steps[half].x, steps[half].y);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              const uint2 two = codes[half][step / 2];
              const uint32_t four = step % 2 == 0 ? two.x : two.y;
              f[4 * step + half] = multiply_bf16_pairs(int8_pair(permute_bytes(four, 0x9180)), by);
              f[4 * step + 2 + half] = multiply_bf16_pairs(int8_pair(permute_bytes(four, 0xb3a2)), by);
            }
          }
        }
#ifdef NUMINOUS_DEBUG
        if (p.debug != nullptr && blockIdx.x == 0 && turn == 0)
          for (int i = 0; i < 32; ++i) {  // register i / 2 = 4 · step + 2 · (which eight) + half, low or high
            const int step = i / 8, second = i / 4 % 2, half = i / 2 % 2, high = i % 2;
            const int dim = run < kLatentPanels ? 64 * run + 16 * t + 8 * second + step + 4 * high
                                                : kLatent + 16 * t + 4 * step + 2 * second + high;
            p.debug[(16 * warp + g + 8 * half) * 576 + dim] = bf16_value(uint16_t(f[i / 2] >> (16 * high)));
          }
#endif
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma_registers(s, f + 4 * step, further(q_at, k_major_step(kHeads, 0, 4 * run + step)), run + step > 0);
        wgmma_commit();
      }
      wgmma_wait();
      hold(s);
    }

    const uint32_t mask = word_at(base + S::kMasks + 16 * at.stage + 4 * warp);
    if (mask != 0xffff) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i)
        if ((mask >> (g + i % 4 / 2 * 8) & 1) == 0) s[i] = -kInf;
    }
    NUMINOUS_DUMP(turn == 0, for (int i = 0; i < kRegisters; ++i)
                                 p.debug[kDebugS + fragment_column(thread, i) * kTile + fragment_row(thread, i)] = s[i])
    if (turn > 0) {
      barrier_wait(weighed + 8 * (buffer ^ 1), turn - 1 >> 1 & 1);  // maxima so far are known
      rise(buffer ^ 1);
    }
    if (turn >= 2) {  // P and what is beside it have been read by both warpgroups
      const Turn before = Turn::of<S>(turn - 2);
      barrier_wait(empty + 8 * before.stage, before.parity);
    }
    uint32_t weights[kColumns];  // of rows g and g + 8, as bf16
    float added[kColumns];       // and their sum
    const auto weigh = [&]() {   // all of the thread's together
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = c / 2 * 4 + c % 2;
        const float by = exponents[head_of(thread, c)];
        const float first = exp2_fast(s[i] * p.scale_log2 - by), second = exp2_fast(s[i + 2] * p.scale_log2 - by);
        weights[c] = bf16_pair(first, second);
        added[c] = first + second;
      }
      float all[2] = {added[0], added[1]};
#pragma unroll
      for (int c = 2; c < kColumns; ++c) all[c % 2] += added[c];
      return all[0] + all[1];
    };
    const bool raise = named_barrier_any(kOneWarpgroup + group, 128, !(weigh() <= kMostWeight));  // NaN asks for it, too
    if (raise) {
      const int me = again(thread);  // addresses that live here only, for want of registers
      float* stat = reinterpret_cast<float*>(shared + S::kP + buffer * S::kPBytes);  // [warp][head], where P will be
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = c / 2 * 4 + c % 2;
        float top = fmaxf(s[i], s[i + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
        if (g == 0) stat[warp * kHeads + head_of(me, c)] = top;
      }
      named_barrier(kOneWarpgroup + group, 128);
      if (me < kHeads) {
        float now = most[me], alpha = 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) now = fmaxf(now, stat[i * kHeads + me]);
        if (now != most[me]) {
          const float by = exponent_of(p, now);
          alpha = exp2_fast(exponents[me] - by);
          most[me] = now;
          exponents[me] = by;
        }
        alphas[buffer * kHeads + me] = alpha;
      }
      named_barrier(kOneWarpgroup + group, 128);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] *= alphas[buffer * kHeads + head_of(me, c)];
      weigh();
    }
    const int me = again(thread), mine = me / 32 * 16 + me % 32 / 4 * 2;  // likewise
    const uint32_t weights_at[2] = {base + S::kP + buffer * S::kPBytes + swizzled(kHeads, head_of(me, 0), mine),
                                    base + S::kP + buffer * S::kPBytes + swizzled(kHeads, head_of(me, 1), mine)};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sum[c] += added[c];
      // Rows g and g + 8 of the warp's 16 are inner values 2g and 2g + 1. Eight heads further the swizzle is the same.
      store_shared(weights_at[c % 2] + c / 2 * 8 * 128, weights[c]);
    }
    if (lane == 0) changed[buffer] = raise;
    NUMINOUS_DUMP(turn == 0, for (int c = 0; c < kColumns; ++c) for (int half = 0; half < 2; ++half)
                                 p.debug[kDebugP + head_of(thread, c) * kTile + 16 * warp + g + 8 * half] =
                                     bf16_value(uint16_t(weights[c] >> (16 * half))))
    fence_for_wgmma();
    __syncwarp();
    if (lane == 0) barrier_arrive(weighed + 8 * buffer);
  };

  // Behind the own tile the other warpgroup's before it and the own one are multiplied; at last the other's alone, which is the same code.
#pragma unroll 1
  for (int turn = group; turn <= turns; turn += 2) {
    if (turn < turns) attend_to(turn);
#pragma unroll 1
    for (int one = max(turn - 1, 0); one < min(turn + 1, turns); ++one) multiply(one);
    if (turn == turns && turn > 0) rise(turn - 1 & 1);
  }

  named_barrier(kAllConsumers, kConsumers);  // q, all tiles, P and factors are read
  float* stat = reinterpret_cast<float*>(shared + S::kSums);  // [warp of eight][head]
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) sum[c] += __shfl_xor_sync(~0u, sum[c], lanes);
    if (g == 0) stat[threadIdx.x / 32 * kHeads + head_of(thread, c)] = sum[c];
  }
  named_barrier(kAllConsumers, kConsumers);
  if (threadIdx.x < kHeads) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += stat[i * kHeads + thread];
    exponents[thread] = w.blocks == 1 ? finish(p, w, thread, most[thread], total, true) : total;
  }
  if (w.blocks > 1) {
    float* stage = reinterpret_cast<float*>(shared + S::kStage);
    write_stage<kHeads>(stage, o);
    return join_cluster(p, w, stage, most, exponents, kHeads);
  }
  named_barrier(kAllConsumers, kConsumers);
  if (w.part < 0) {
    write_output<kHeads, false>(p, w, o, exponents);
  } else {
    write_output<kHeads, true>(p, w, o, exponents);
  }
}

// --- Kernels ------------------------------------------------------------------------------------------------------------------

// Threads 0 … 255 consume, the rest produce.
template <class R, int kHeads>
__device__ __forceinline__ void attend(const Params& p) {
  using S = PackedPlan<R, kHeads>;
  uint8_t* shared = dynamic_shared();
  shared += (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared), full = base + S::kBarriers;
  const Work w = clustered_work_of(p, kHeads);
  if (p.whole < p.tokens && p.splits > 1) start_next_grid();  // `combine` may start when all blocks have come here; it waits for their end

  if (w.blocks == 1 && no_part(p, w, kHeads)) return;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kCount; ++stage) {
      barrier_init(full + 8 * stage, 4);                // producing warps
      barrier_init(full + 8 * (S::kCount + stage), 8);  // consuming warps
    }
    for (int group = 0; group < 2; ++group) barrier_init(full + 8 * (2 * S::kCount + group), 4);
    fence_after_init();
  }
  if (threadIdx.x < kHeads) {
    reinterpret_cast<float*>(shared + S::kMost)[threadIdx.x] = -kInf;
    reinterpret_cast<float*>(shared + S::kBy)[threadIdx.x] = kNoScore;
  }

  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    produce<R, S>(p, w, base);
  } else {
    __syncthreads();
    more_registers<kConsumerRegisters>();
    consume<R, kHeads>(p, w, shared);
  }
}

}  // namespace numinous

#define NUMINOUS_KERNEL(name, heads)                                                                          \
  extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ numinous::Params p) {     \
    numinous::attend<numinous::Row<NUMINOUS_WIDTH>, heads>(p);                                                \
  }

NUMINOUS_KERNEL(packed_64, 64)
NUMINOUS_KERNEL(packed_32, 32)
NUMINOUS_KERNEL(packed_16, 16)
NUMINOUS_KERNEL(packed_8, 8)
