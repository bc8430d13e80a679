// SPDX-License-Identifier: Apache-2.0
//
// Sparse MLA decode on Hopper: out = softmax(scale · q · Kᵀ) · V over the rows that a query names, K = latent and rope, V = latent.
//
// A block has one query token, up to 64 of its heads, and a run of tiles of 64 rows (split-K). Producers gather scattered rows into
// registers, a tile ahead, decode them to bf16 and store a tile of two that lie in shared memory, swizzled; consumers multiply. Tiles are
// filled and given back by halves of 32 rows: four buffers, of which two side by side are one operand of S.
//
//   wide    33 … 64 heads: S = Q · Kᵀ [heads, rows]. Two warpgroups have S and softmax of a tile by turns, and each half of the latent
//           in O = P · V of all tiles.
//   narrow  up to 16 or 32 heads, so that nothing is padded to 64: Sᵀ = K · Qᵀ [rows, heads], Oᵀ = Vᵀ · Pᵀ [latent, heads]. Two
//           warpgroups with every other tile each and a softmax of its own; they meet at the end.
//
// No raw bytes go through shared memory: its bandwidth is what few heads are bound by (docs/deep-dives/sparse-mla-decode.md),
// and with 64 heads there is no room. `layout.cuh` has every address, `sm90.cuh` every instruction, `common.cuh`
// what does not depend on either.
//
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

constexpr int kProducerGroups = 2;
// Of a thread; 2 × 64 + 2 × 192 = 4 × 128. With eight fewer, a producer's quarter of 656 bytes spills; with 16 more, 32 heads of a consumer.
constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;

// --- Producers ----------------------------------------------------------------------------------------------------------------

// Asks for the block's part of its list in L2, by a warp: read a tile at a time, each would wait for device memory. Of a list of millions
// the first 64 tiles, because rows want L2, too.
__device__ __forceinline__ void prefetch_ids(const Params& p, const Work& w) {
  const int end = min(w.end, w.begin + 64), bytes = p.wide_ids ? 8 : 4;
  const int64_t from = p.lengths != nullptr ? w.request * p.index_stride + w.begin : w.token * p.index_stride + w.begin * kTile;
  const int count = p.lengths != nullptr ? end - w.begin : min(end * kTile, w.length) - w.begin * kTile;
  const uint64_t first = reinterpret_cast<uint64_t>(p.index) + from * bytes;
  const uint64_t at = first & ~uint64_t(15);  // the 16 bytes that an id lies in are memory of the table's allocation
  if (count > 0) prefetch_bytes(reinterpret_cast<const uint8_t*>(at), uint32_t((first + uint64_t(count) * bytes + 15 & ~uint64_t(15)) - at));
}

// Barrier of half `half` of the tile at turn `turn`, and the parity of the phase in which it is filled and given back.
__device__ __forceinline__ uint32_t of_half(uint32_t barriers, int turn, int half) { return barriers + 16 * (turn & 1) + 8 * half; }
__device__ __forceinline__ uint32_t parity_of(int turn) { return turn >> 1 & 1; }

// The warpgroup that fills half `group` of every tile, and waits for nothing but these halves. While the consumers work on a tile, a thread
// has a quarter of a row of the next one under way in its registers, rows of the one after that are on their way to L2, and ids of a further
// one to registers.
template <class R>
__device__ __forceinline__ void produce(const Params& p, const Work& w, int group, uint32_t tiles, float* bias, uint32_t full,
                                        uint32_t empty) {
  static_assert(kHalf == kRowsOfPass && kProducerGroups == 2, "a thread has a quarter of one row");
  const int thread = threadIdx.x % 128, quarter = producer_quarter(thread), row = producer_row(thread, group, kProducerGroups, 0);
  const auto prefetch = [&](Entry e) {
    const int64_t slot = slot_of(p, e, row);
    const uint64_t at = slot >= 0 && slot < p.slots ? reinterpret_cast<uint64_t>(p.pool + slot * p.pool_stride) : 0;
#pragma unroll
    for (int lane = 0; lane < 8; ++lane) {  // one of each row of the warp
      const uint64_t one = uint64_t(uint32_t(uniform(int(at >> 32), lane))) << 32 | uint32_t(uniform(int(at), lane));
      if (one != 0) prefetch_row<R::kBytes>(reinterpret_cast<const uint8_t*>(one));
    }
  };
  Raw<R> raw;
  const Entry first = entry_of(p, w, w.begin, row);
  Entry next = entry_of(p, w, w.begin + 1, row), later = entry_of(p, w, w.begin + 2, row);
  __syncthreads();  // barriers are made
  raw.fetch(p, slot_of(p, first, row), quarter);
  prefetch(next);
  if (group == 0 && thread < 32) prefetch_ids(p, w);
  for (int tile = w.begin; tile < w.end; ++tile) {
    const int turn = tile - w.begin, buffer = turn & 1;
    barrier_wait(of_half(empty, turn, group), parity_of(turn) ^ 1);
    decode(raw, tiles + buffer * R::kTileBytes, row, quarter);
    if (quarter == 0) bias[buffer * kTile + row] = raw.valid ? 0.0f : -kInf;
    // The fence may wait for loads that are under way, and so would whoever waits for the tile.
    fence_for_wgmma();
    barrier_arrive(of_half(full, turn, group));
    // In front of the rows, which are waited for together with them.
    const Entry latest = entry_of(p, w, tile + 3, row);
    raw.fetch(p, slot_of(p, next, row), quarter);
    prefetch(later);
    next = later;
    later = latest;
  }
}

// --- Consumers ----------------------------------------------------------------------------------------------------------------

#ifdef NUMINOUS_DEBUG
constexpr int kDebugS = kTile * 576, kDebugP = kDebugS + 64 * kTile;  // debug: K [64][576], S [64 heads][64], P [64 heads][64]

template <class R>
__device__ void dump_tile(float* debug, const uint8_t* tile) {
  for (int i = threadIdx.x % 128; i < kTile * R::kPanels * 64; i += 128) {
    const int row = i / (R::kPanels * 64), position = i % (R::kPanels * 64);
    const int dim = dim_of_position(R::kFourBit && position < kLatent, position);
    debug[row * 576 + dim] = bf16_value(*reinterpret_cast<const uint16_t*>(tile + swizzled(kTile, row, position)));
  }
}
#define NUMINOUS_DUMP(first, statement) \
  if (p.debug != nullptr && blockIdx.x == 0 && first) { statement; }
#else
#define NUMINOUS_DUMP(first, statement)
#endif

template <class R>
__device__ __forceinline__ void consume_wide(const Params& p, const Work& w, uint8_t* shared) {
  using S = Plan<R, 64, true>;
  const int thread = threadIdx.x % 128, half = uniform(threadIdx.x / 128);
  const uint32_t base = shared_address(shared);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);
  float* stat = reinterpret_cast<float*>(shared + S::kStat);  // sums [half][head]
  float* maxima = stat + 128;                                 // [head] so far, of whoever wrote P
  float* sums = stat + 192;                                   // [head], for the cluster
  const uint32_t full = base + S::kBarriers, empty = full + 32, peaked = full + 64, weighed = full + 72;

  const uint64_t q_at = descriptor(base + S::kQ, 16, kGroupBytes), p_at = descriptor(base + S::kP, 16, kGroupBytes);
  load_q<R, 64>(p, w, base + S::kQ);
  fence_for_wgmma();
  named_barrier(kAllConsumers, kConsumers);

  float o[2][64];  // [head, 128 values] twice: an instruction with all 256 is refused where threads start with 128 registers
#pragma unroll
  for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0.0f;
  float most[2] = {-kInf, -kInf}, sum[2] = {0.0f, 0.0f};  // of heads fragment_row(thread, 0) and 8 further; sums of own tiles only

  // The largest scores are now `now`.
  const auto rise = [&](const float (&now)[2]) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Not exp2 of the difference: that is contracted to an FMA and not 1 where the maximum stays.
      alpha[r] = now[r] == most[r] ? 1.0f : exp2_fast(most[r] * p.scale_log2 - exponent_of(p, now[r]));
      most[r] = now[r];
      sum[r] *= alpha[r];
    }
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o[0][i] *= alpha[i % 4 / 2];
        o[1][i] *= alpha[i % 4 / 2];
      }
    }
  };
  // Products of P with this warpgroup's half of V, put under way, those of the tile's first half first.
  const auto multiply = [&](int turn) {
    const uint64_t v_at =
        descriptor(base + S::kTiles + (turn & 1) * R::kTileBytes + mn_major_step(4 * half, 0), kTilePanelBytes, kGroupBytes);
    hold(o[0]);
    hold(o[1]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part)
        wgmma<false, true>(o[part], further(p_at, k_major_step(64, 0, step)), further(v_at, mn_major_step(2 * part, step)), true);
      if (step % 2 == 1) wgmma_commit();
    }
  };
  // They are done: both halves of the tile, and with the second one P, are read.
  const auto give_back = [&](int turn) {
    wgmma_wait<1>();
    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 0));
    wgmma_wait();
    hold(o[0]);
    hold(o[1]);
    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 1));
  };
  const auto wait_for_tile = [&](int turn) {
    barrier_wait(of_half(full, turn, 0), parity_of(turn));
    barrier_wait(of_half(full, turn, 1), parity_of(turn));
  };
  // The other warpgroup's tile, in front of the own one that follows it: that one may still be on its way, and to be filled the tile behind
  // it waits for this one. Maxima are known before P is.
  const auto attend_theirs = [&](int turn) {
    wait_for_tile(turn);
    barrier_wait(peaked, turn & 1);
    const float now[2] = {maxima[fragment_row(thread, 0)], maxima[fragment_row(thread, 2)]};
    rise(now);
    barrier_wait(weighed, turn & 1);
    multiply(turn);
    give_back(turn);
  };

  const int turns = w.end - w.begin;
  if (half == 1 && turns > 0) attend_theirs(0);
  for (int turn = half; turn < turns; turn += 2) {
    const int buffer = turn & 1;
    wait_for_tile(turn);
    NUMINOUS_DUMP(turn == 0, dump_tile<R>(p.debug, shared + S::kTiles))
    const uint64_t k_at = descriptor(base + S::kTiles + buffer * R::kTileBytes, 16, kGroupBytes);
    float s[32];  // [head, row]
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < R::kPanels * 4; ++step)
      wgmma<false, false>(s, further(q_at, k_major_step(64, 0, step)), further(k_at, k_major_step(kTile, 0, step)), step > 0);
    wgmma_commit();
    wgmma_wait();
    hold(s);

    float now[2] = {most[0], most[1]}, added[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = biased(s[i], bias[buffer * kTile + fragment_column(thread, i)]);
      now[i % 4 / 2] = fmaxf(now[i % 4 / 2], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
    }
    if (thread % 4 == 0) {
      maxima[fragment_row(thread, 0)] = now[0];
      maxima[fragment_row(thread, 2)] = now[1];
    }
    barrier_arrive(peaked);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      NUMINOUS_DUMP(turn == 0, p.debug[kDebugS + fragment_row(thread, i) * kTile + fragment_column(thread, i)] = s[i])
      s[i] = exp2_fast(s[i] * p.scale_log2 - exponent_of(p, now[i % 4 / 2]));
      added[i % 4 / 2] += s[i];
      NUMINOUS_DUMP(turn == 0, p.debug[kDebugP + fragment_row(thread, i) * kTile + fragment_column(thread, i)] = s[i])
    }
    if (turn > 0) barrier_wait(of_half(empty, turn - 1, 1), parity_of(turn - 1));  // by both warpgroups: P is free
#pragma unroll
    for (int i = 0; i < 32; i += 2)
      store_shared(base + S::kP + swizzled(64, fragment_row(thread, i), fragment_column(thread, i)), bf16_pair(s[i], s[i + 1]));
    fence_for_wgmma();
    barrier_arrive(weighed);
    rise(now);
    sum[0] += added[0];
    sum[1] += added[1];
    barrier_wait(weighed, turn & 1);
    multiply(turn);
    give_back(turn);
    if (turn + 1 < turns) attend_theirs(turn + 1);
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    if (thread % 4 == 0) stat[half * 64 + fragment_row(thread, 2 * r)] = sum[r];
  }
  named_barrier(kAllConsumers, kConsumers);
  float* stage = reinterpret_cast<float*>(shared + S::kStage);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = fragment_row(thread, 2 * r);
    const bool writes = half == 0 && thread % 4 == 0;
    const float total = stat[head] + stat[64 + head];  // in one order in both warpgroups, so that both have the same factor
    if (w.blocks == 1) {
      factor[r] = finish(p, w, head, most[r], total, writes);
    } else {
      factor[r] = 1.0f;
      if (writes) {
        maxima[head] = most[r];
        sums[head] = total;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int dim = dim_of_position(R::kFourBit, 256 * half + fragment_column(thread, i));
    stage[fragment_row(thread, i) * kStageStride + dim] = o[i / 64][i % 64] * factor[i % 4 / 2];
  }
  if (w.blocks > 1) return join_cluster(p, w, stage, maxima, sums, 64);
  named_barrier(kAllConsumers, kConsumers);
  store_output(p, w, stage, 64);
}

// Narrow: a thread has kHeads / 4 heads in a fragment [64, kHeads]. Head `c` of them is the column of register c / 2 × 4 + c % 2,
// and of the register two further, 8 rows below.
__device__ __forceinline__ int own_head(int i) { return i / 4 * 2 + i % 2; }  // of register i
__device__ __forceinline__ int head_of(int thread, int c) { return fragment_column(thread, c / 2 * 4 + c % 2); }

// Maxima or sums of each head over the rows of a warpgroup, by way of `stat` [warp][head].
template <int kHeads, bool kMax>
__device__ __forceinline__ void over_rows(float (&x)[kHeads / 4], float* stat, int thread, int barrier) {
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      const float other = __shfl_xor_sync(~0u, x[c], lanes);
      x[c] = kMax ? fmaxf(x[c], other) : x[c] + other;
    }
    if (thread % 32 < 4) stat[thread / 32 * kHeads + head_of(thread, c)] = x[c];
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    x[c] = stat[head_of(thread, c)];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) {
      const float other = stat[warp * kHeads + head_of(thread, c)];
      x[c] = kMax ? fmaxf(x[c], other) : x[c] + other;
    }
  }
}

template <class R, int kHeads>
__device__ __forceinline__ void consume_narrow(const Params& p, const Work& w, uint8_t* shared) {
  using S = Plan<R, kHeads, false>;
  constexpr int kRegisters = kHeads / 2, kColumns = kHeads / 4;  // of a fragment [64, heads]; heads that a thread has
  const int thread = threadIdx.x % 128, group = uniform(threadIdx.x / 128);
  const uint32_t base = shared_address(shared);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias) + group * kTile;
  float* stat = reinterpret_cast<float*>(shared + S::kStat) + group * 4 * kHeads;  // [warp][head]
  const uint32_t full = base + S::kBarriers, empty = full + 32;
  const uint32_t k = base + S::kTiles + group * R::kTileBytes, probabilities = base + S::kP + group * S::kPBytes;
  const uint64_t q_at = descriptor(base + S::kQ, 16, kGroupBytes), p_at = descriptor(probabilities, 16, kGroupBytes);
  const uint64_t k_at = descriptor(k, 16, kGroupBytes), v_at = descriptor(k, kTilePanelBytes, kGroupBytes);
  load_q<R, kHeads>(p, w, base + S::kQ);
  fence_for_wgmma();
  named_barrier(kAllConsumers, kConsumers);

  float o[kLatentPanels][kRegisters];  // [latent, heads]
#pragma unroll
  for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) o[panel][i] = 0.0f;
  float most[kColumns], sum[kColumns];  // sums of own rows only
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    most[c] = -kInf;
    sum[c] = 0.0f;
  }

  for (int turn = group; turn < w.end - w.begin; turn += 2) {
    barrier_wait(of_half(full, turn, 0), parity_of(turn));
    barrier_wait(of_half(full, turn, 1), parity_of(turn));

    float s[kRegisters];  // [64 rows, heads]
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < R::kPanels * 4; ++step)
      wgmma<false, false>(s, further(k_at, k_major_step(kTile, 0, step)),
                          further(q_at, k_major_step(kHeads, 0, step)), step > 0);
    wgmma_commit();
    wgmma_wait();
    hold(s);

    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) top[c] = -kInf;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      s[i] = biased(s[i], bias[fragment_row(thread, i)]);
      top[own_head(i)] = fmaxf(top[own_head(i)], s[i]);
    }
    over_rows<kHeads, true>(top, stat, thread, kOneWarpgroup + group);

    bool same = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      top[c] = fmaxf(most[c], top[c]);
      same = same && top[c] == most[c];
    }
    if (__any_sync(~0u, !same)) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float alpha = top[c] == most[c] ? 1.0f : exp2_fast(most[c] * p.scale_log2 - exponent_of(p, top[c]));
        most[c] = top[c];
        sum[c] *= alpha;
#pragma unroll
        for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
          for (int r = 0; r < 2; ++r) o[panel][c / 2 * 4 + c % 2 + 2 * r] *= alpha;
      }
    }
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const float weight = exp2_fast(s[i] * p.scale_log2 - exponent_of(p, most[own_head(i)]));
      sum[own_head(i)] += weight;
      store_shared(probabilities + swizzled(kHeads, fragment_column(thread, i), fragment_row(thread, i)),
                   uint16_t(bf16_pair(weight, 0.0f)));
      NUMINOUS_DUMP(turn == 0, const int at = fragment_column(thread, i) * kTile + fragment_row(thread, i);
                    p.debug[kDebugS + at] = s[i]; p.debug[kDebugP + at] = weight)
    }
    NUMINOUS_DUMP(turn == 0, dump_tile<R>(p.debug, shared + S::kTiles))
    fence_for_wgmma();
    named_barrier(kOneWarpgroup + group, 128);

#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel) hold(o[panel]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // halves of the tile
#pragma unroll
      for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
        for (int step = 2 * part; step < 2 * part + 2; ++step)
          wgmma<true, false>(o[panel], further(v_at, mn_major_step(panel, step)),
                             further(p_at, k_major_step(kHeads, 0, step)), true);
      wgmma_commit();
    }
    wgmma_wait<1>();
    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 0));
    wgmma_wait();
#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel) hold(o[panel]);
    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 1));
  }

  named_barrier(kOneWarpgroup + group, 128);  // maxima are read
  over_rows<kHeads, false>(sum, stat, thread, kOneWarpgroup + group);
  named_barrier(kAllConsumers, kConsumers);  // all tiles and sums are read
  float* stage = reinterpret_cast<float*>(shared + S::kStage);
  float* theirs = reinterpret_cast<float*>(shared + S::kStat);  // [2][head]: the second warpgroup's maxima and sums
  float* tops = theirs + 2 * kHeads;                            // [2][head]: both warpgroups', for the cluster
  if (group == 1) {
#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
      for (int i = 0; i < kRegisters; ++i)
        stage[fragment_column(thread, i) * kStageStride + 64 * panel + fragment_row(thread, i)] = o[panel][i];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (thread < 4) {
        theirs[head_of(thread, c)] = most[c];
        theirs[kHeads + head_of(thread, c)] = sum[c];
      }
  }
  named_barrier(kAllConsumers, kConsumers);
  if (group == 0) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int head = head_of(thread, c);
      const float now = fmaxf(most[c], theirs[head]), by = exponent_of(p, now);
      float mine = exp2_fast(most[c] * p.scale_log2 - by), other = exp2_fast(theirs[head] * p.scale_log2 - by);
      const float total = sum[c] * mine + theirs[kHeads + head] * other;
      if (w.blocks == 1) {
        const float factor = finish(p, w, head, now, total, thread < 4);
        mine *= factor;
        other *= factor;
      } else if (thread < 4) {
        tops[head] = now;
        tops[kHeads + head] = total;
      }
#pragma unroll
      for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
        for (int i = c / 2 * 4 + c % 2; i < c / 2 * 4 + 4; i += 2) {
          float* at = stage + head * kStageStride + 64 * panel + fragment_row(thread, i);
          *at = o[panel][i] * mine + *at * other;
        }
    }
  }
  named_barrier(kAllConsumers, kConsumers);
  // The stage is in the order of positions.
  if constexpr (R::kFourBit) {
    for (int i = threadIdx.x; i < kHeads * (kLatent / 8); i += kConsumers) {
      float* eight = stage + i / (kLatent / 8) * kStageStride + i % (kLatent / 8) * 8;
      float v[8];
#pragma unroll
      for (int at = 0; at < 8; ++at) v[dim_of_position(true, at)] = eight[at];
#pragma unroll
      for (int at = 0; at < 8; ++at) eight[at] = v[at];
    }
    if (w.blocks == 1) named_barrier(kAllConsumers, kConsumers);
  }
  if (w.blocks > 1) return join_cluster(p, w, stage, tops, tops + kHeads, kHeads);
  store_output(p, w, stage, kHeads);
}

// --- Kernels ------------------------------------------------------------------------------------------------------------------

// Threads 0 … 255 consume, the rest produce.
template <class R, int kHeads, bool kWide>
__device__ __forceinline__ void attend(const Params& p) {
  using S = Plan<R, kHeads, kWide>;
  uint8_t* shared = dynamic_shared();
  shared += (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared), full = base + S::kBarriers, empty = full + 32;
  const Work w = clustered_work_of(p, kHeads);
  if (p.whole < p.tokens && p.splits > 1) start_next_grid();  // `combine` may start when all blocks have come here; it waits for their end

  if (w.blocks == 1 && no_part(p, w, kHeads)) return;
  if (threadIdx.x == 0) {
    for (int half = 0; half < 4; ++half) {
      barrier_init(full + 8 * half, 128);
      barrier_init(empty + 8 * half, kWide ? 8 : 4);  // warps that read a tile
    }
    if (kWide) {
      barrier_init(empty + 32, 128);  // peaked
      barrier_init(empty + 40, 128);  // weighed
    }
    fence_after_init();
  }

  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    produce<R>(p, w, uniform((threadIdx.x - kConsumers) / 128), base + S::kTiles,
               reinterpret_cast<float*>(shared + S::kBias), full, empty);
  } else {
    __syncthreads();
    more_registers<kConsumerRegisters>();
    if constexpr (kWide) {
      consume_wide<R>(p, w, shared);
    } else {
      consume_narrow<R, kHeads>(p, w, shared);
    }
  }
}

}  // namespace numinous

#define NUMINOUS_KERNEL(name, threads, heads, wide)                                                             \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ numinous::Params p) {   \
    numinous::attend<numinous::Row<NUMINOUS_WIDTH>, heads, wide>(p);                                            \
  }

NUMINOUS_KERNEL(wide, 512, 64, true)
NUMINOUS_KERNEL(narrow_32, 512, 32, false)
NUMINOUS_KERNEL(narrow_16, 512, 16, false)
