// SPDX-License-Identifier: Apache-2.0
//
// Sparse MLA decode on Hopper: out = softmax(scale · q · Kᵀ) · V over the rows that a query names, K = latent and rope, V = latent.
//
// A block has one query token, up to 64 of its heads, and a run of tiles of 64 rows (split-K). Producers gather scattered rows into
// registers, a tile ahead, decode them to bf16 and store a tile of two that lie in shared memory, swizzled; consumers multiply.
//
//   wide    33 … 64 heads: S = Q · Kᵀ [heads, rows]. Two warpgroups, each with half of a tile's rows in S, and after they have
//           exchanged row maxima and P, each with half of the latent in O = P · V.
//   narrow  up to 16 or 32 heads, so that nothing is padded to 64: Sᵀ = K · Qᵀ [rows, heads], Oᵀ = Vᵀ · Pᵀ [latent, heads]. Two
//           warpgroups with every other tile each and a softmax of its own; they meet at the end.
//
// No raw bytes go through shared memory: its bandwidth is what few heads are bound by (docs/deep-dives/sparse-mla-decode.md),
// and with 64 heads there is no room. `layout.cuh` has every address, `sm90.cuh` every instruction.
//
// Compiled once for each width of a row, NUMINOUS_WIDTH. With NUMINOUS_DEBUG=1, block 0 writes its first K tile, S and P to `debug`.

#include <cmath>

#include "layout.cuh"
#ifdef NUMINOUS_MODEL  // the tests' model of a block of threads on the CPU
#include NUMINOUS_MODEL
#else
#include "sm90.cuh"
#endif

namespace numinous {

struct Params {
  const uint16_t* q;       // bf16 [requests, queries, heads, 512 + rope]
  const uint8_t* pool;
  const void* index;       // ids [tokens, width], or pages [requests, width / 64]; int32 or int64
  const int* lengths;      // [requests], dense only
  const float* sink;       // [heads], or null
  uint16_t* out;           // bf16 [tokens, heads, 512]
  float* lse;              // [tokens, heads], natural
  float* part_out;         // [tokens, splits, heads, 512], where splits > 1
  float* part_lse;         // [tokens, splits, heads], base 2
  float* debug;
  int64_t q_request_stride, q_query_stride, q_head_stride;  // elements
  int64_t pool_stride;                                      // bytes
  int64_t index_stride;                                     // elements from token to token, dense: from request to request
  int64_t slots;
  int tokens, queries, heads, width, splits, wide_ids;
  float scale_log2;   // of scores of what tiles hold, times log2(e)
  float out_scale;    // from what tiles hold to values
  uint32_t q_factor;  // pair of bf16 that multiplies the latent part of q: a power of two
};

constexpr int kConsumers = 256;
constexpr float kInf = INFINITY;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Names of barriers; 0 is __syncthreads.
constexpr int kAllConsumers = 1, kOneWarpgroup = 2;

struct Work {
  int token, request, query, head, split, begin, end, length;  // tiles begin … end of a list of `length` entries
};

__device__ __forceinline__ Work work_of(const Params& p, int heads_of_block) {
  Work w;
  w.token = blockIdx.x / p.splits;
  w.split = blockIdx.x % p.splits;
  w.request = w.token / p.queries;
  w.query = w.token % p.queries;
  w.head = blockIdx.y * heads_of_block;
  w.length = p.lengths == nullptr ? p.width : visible(p.lengths[w.request], p.queries, w.query, p.width);
  const int tiles = tiles_of(w.length);
  w.begin = first_tile(tiles, p.splits, w.split);
  w.end = first_tile(tiles, p.splits, w.split + 1);
  return w;
}

// --- Producers ----------------------------------------------------------------------------------------------------------------

// What the table has for a row: nothing is done with it before it is used, so that its load is not waited for.
struct Entry {
  int low, high;
};

// Entry of row `row` of a tile; negative where there is none.
__device__ __forceinline__ Entry entry_of(const Params& p, const Work& w, int tile, int row) {
  const int at = tile * kTile + row;
  Entry e = {-1, -1};
  if (tile >= w.end || at >= w.length) return e;
  const int64_t from = p.lengths != nullptr ? w.request * p.index_stride + tile : w.token * p.index_stride + at;
  const int* id = static_cast<const int*>(p.index) + (p.wide_ids ? 2 * from : from);
  e.low = id[0];
  if (p.wide_ids) e.high = id[1];
  return e;
}

// Slot of an entry; negative where there is none.
__device__ __forceinline__ int64_t slot_of(const Params& p, Entry e, int row) {
  const int64_t id = int64_t(p.wide_ids ? e.high : e.low >> 31) << 32 | uint32_t(e.low);
  if (p.lengths == nullptr) return id;
  return id < 0 || id > p.slots / kTile ? -1 : id * kTile + row;
}

// What one producer holds of one row: a quarter of it, and all of its scales.
template <class R>
struct Raw {
  uint4 codes[R::kChunks];
  uint4 scales[R::kFourBit ? 2 : 1];
  uint4 rope[R::kRope ? (R::kFourBit ? 1 : 2) : 1];
  bool valid;

  __device__ __forceinline__ void fetch(const Params& p, int64_t slot, int quarter) {
    valid = slot >= 0 && slot < p.slots;
    const uint4 zero = {0, 0, 0, 0};
    const uint8_t* row = p.pool + (valid ? slot : 0) * p.pool_stride;
    const uint8_t* mine = row + 16 * quarter;  // chunk_of(quarter, k) is quarter + 4k
#pragma unroll
    for (int k = 0; k < R::kChunks; ++k) codes[k] = valid ? load_row(mine + 16 * chunk_of(0, k)) : zero;
#pragma unroll
    for (int k = 0; k < (R::kFourBit ? 2 : 1); ++k) scales[k] = valid ? load_row(row + R::kScaleAt + 16 * k) : zero;
    if constexpr (R::kRope) {
#pragma unroll
      for (int k = 0; k < (R::kFourBit ? 1 : 2); ++k)
        rope[k] = valid ? load_row(mine + R::kRopeAt + 16 * chunk_of(0, k)) : zero;
    }
  }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four E4M3 codes times a factor as two pairs of bf16.
__device__ __forceinline__ void four_e4m3(uint32_t codes, float factor, uint32_t& first, uint32_t& second) {
  const float2 a = e4m3_values(codes), b = e4m3_values(codes >> 16);
  first = bf16_pair(a.x * factor, a.y * factor);
  second = bf16_pair(b.x * factor, b.y * factor);
}

template <class R>
__device__ __forceinline__ void decode(const Raw<R>& raw, uint32_t tile, int row, int quarter) {
  const uint32_t first = tile + swizzled(kTile, row, (R::kFourBit ? 32 : 16) * quarter);
  if constexpr (R::kFourBit) {
#pragma unroll
    for (int k = 0; k < R::kChunks; ++k) {
      // Chunk c has blocks 2c and 2c + 1; c = quarter + 4k, so that their scales are half a word of 8k + 2 × quarter … bytes.
      const uint32_t four = quarter & 2 ? word(raw.scales[k / 2], k % 2 * 2 + 1) : word(raw.scales[k / 2], k % 2 * 2);
      const float2 scale = e4m3_values(quarter & 1 ? four >> 16 : four);
      const uint32_t scales[2] = {bf16_pair(scale.x * kScaleUnit, scale.x * kScaleUnit),
                                  bf16_pair(scale.y * kScaleUnit, scale.y * kScaleUnit)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t codes = word(raw.codes[k], j), by = scales[j / 2];
        store_shared(stored<R>(first, k, j),
                     uint4{multiply_bf16_pairs(e2m1_pair(codes, 0), by), multiply_bf16_pairs(e2m1_pair(codes, 1), by),
                           multiply_bf16_pairs(e2m1_pair(codes, 2), by), multiply_bf16_pairs(e2m1_pair(codes, 3), by)});
      }
    }
    if constexpr (R::kRope) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 v;
        four_e4m3(word(raw.rope[0], 2 * half), kHeld, v.x, v.y);
        four_e4m3(word(raw.rope[0], 2 * half + 1), kHeld, v.z, v.w);
        store_shared(tile + swizzled(kTile, row, kLatent + 16 * quarter + 8 * half), v);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < R::kChunks; ++k) {
      const float scale = __uint_as_float(word(raw.scales[0], k / 2));  // chunk quarter + 4k is in group k / 2
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 v;
        four_e4m3(word(raw.codes[k], 2 * half), scale, v.x, v.y);
        four_e4m3(word(raw.codes[k], 2 * half + 1), scale, v.z, v.w);
        store_shared(stored<R>(first, k, half), v);
      }
    }
    if constexpr (R::kRope) {
#pragma unroll
      for (int k = 0; k < 2; ++k) store_shared(tile + swizzled(kTile, row, kLatent + 8 * chunk_of(quarter, k)), raw.rope[k]);
    }
  }
}

// A warpgroup of `kGroups` that fill tiles. Rows are under way in registers while the consumers work on the tile before.
template <class R, int kGroups>
__device__ __forceinline__ void produce(const Params& p, const Work& w, int group, uint32_t tiles, float* bias, uint32_t full,
                                        uint32_t empty) {
  constexpr int kPasses = kTile / kRowsOfPass / kGroups;
  const int thread = threadIdx.x % 128, quarter = producer_quarter(thread);
  Raw<R> raw[kPasses];
  Entry next[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) next[pass] = entry_of(p, w, w.begin, producer_row(thread, group, kGroups, pass));
  const auto fetch = [&](int after) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      raw[pass].fetch(p, slot_of(p, next[pass], producer_row(thread, group, kGroups, pass)), quarter);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      next[pass] = entry_of(p, w, after, producer_row(thread, group, kGroups, pass));
  };
  fetch(w.begin + 1);
  for (int tile = w.begin; tile < w.end; ++tile) {
    const int turn = tile - w.begin, buffer = turn & 1;
    barrier_wait(empty + 8 * buffer, (turn >> 1 & 1) ^ 1);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = producer_row(thread, group, kGroups, pass);
      decode(raw[pass], tiles + buffer * R::kTileBytes, row, quarter);
      if (quarter == 0) bias[buffer * kTile + row] = raw[pass].valid ? 0.0f : -kInf;
    }
    // The fence may wait for loads that are under way, and so would whoever waits for the tile.
    fence_for_wgmma();
    barrier_arrive(full + 8 * buffer);
    fetch(tile + 2);
  }
}

// --- Consumers ----------------------------------------------------------------------------------------------------------------

// What is subtracted from exponents under a largest score: that score, but never infinity from infinity.
__device__ __forceinline__ float exponent_of(const Params& p, float most) {
  return most == -kInf ? 0.0f : most * p.scale_log2;
}

// Heads head … head + kHeads of q into panels, in the order in which tiles hold a row; heads that are none as zeros.
template <class R, int kHeads>
__device__ __forceinline__ void load_q(const Params& p, const Work& w, uint32_t to) {
  constexpr int kChunksOfHead = R::kPanels * 8;
  const uint16_t* q = p.q + w.request * p.q_request_stride + w.query * p.q_query_stride + w.head * p.q_head_stride;
  constexpr int kAll = kHeads * kChunksOfHead, kTurns = (kAll + kConsumers - 1) / kConsumers;
  uint4 all[kTurns];  // all loads under way at once
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = turn * kConsumers + threadIdx.x, head = i / kChunksOfHead, chunk = i % kChunksOfHead;
    all[turn] = {0, 0, 0, 0};
    if (((turn + 1) * kConsumers <= kAll || head < kHeads) && w.head + head < p.heads)
      all[turn] = *reinterpret_cast<const uint4*>(q + head * p.q_head_stride + 8 * chunk);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = turn * kConsumers + threadIdx.x, head = i / kChunksOfHead, chunk = i % kChunksOfHead;
    if ((turn + 1) * kConsumers > kAll && head >= kHeads) break;
    uint4 v = all[turn];
    if (chunk < kLatent / 8) {
      v = {multiply_bf16_pairs(v.x, p.q_factor), multiply_bf16_pairs(v.y, p.q_factor), multiply_bf16_pairs(v.z, p.q_factor),
           multiply_bf16_pairs(v.w, p.q_factor)};
      if constexpr (R::kFourBit)  // dim_of_position: values i and i + 4 side by side
        v = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
             __byte_perm(v.y, v.w, 0x7632)};
    }
    store_shared(to + swizzled(kHeads, head, 8 * chunk), v);
  }
}

// The stage's heads to memory: final, or a split's part.
__device__ __forceinline__ void store_output(const Params& p, const Work& w, const float* stage, int heads_of_block) {
  const int heads = min(heads_of_block, p.heads - w.head);
  for (int i = threadIdx.x; i < heads * (kLatent / 4); i += kConsumers) {
    const int head = i / (kLatent / 4), four = i % (kLatent / 4);
    const float4 v = *reinterpret_cast<const float4*>(stage + head * kStageStride + 4 * four);
    if (p.splits == 1) {
      const int64_t row = int64_t(w.token) * p.heads + w.head + head;
      *reinterpret_cast<uint2*>(p.out + row * kLatent + 4 * four) = uint2{bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    } else {
      const int64_t row = (int64_t(w.token) * p.splits + w.split) * p.heads + w.head + head;
      *reinterpret_cast<float4*>(p.part_out + row * kLatent + 4 * four) = v;
    }
  }
}

// Factor of a head's sum of rows, whose largest score is `most` (in units of the tiles) and whose weights add up to `sum`; its
// lse is stored by whoever `writes`.
__device__ __forceinline__ float finish(const Params& p, const Work& w, int head, float most, float sum, bool writes) {
  const bool none = sum == 0.0f;
  const float top = most * p.scale_log2;
  float total = sum;
  if (w.head + head < p.heads) {
    const float lse = none ? -kInf : top + log2_fast(sum);
    if (p.splits == 1) {
      if (writes) p.lse[int64_t(w.token) * p.heads + w.head + head] = lse * kLn2;
      if (p.sink != nullptr && !none) total += exp2f(p.sink[w.head + head] * kLog2E - top);
    } else if (writes) {
      p.part_lse[(int64_t(w.token) * p.splits + w.split) * p.heads + w.head + head] = lse;
    }
  }
  return none ? 0.0f : p.out_scale / total;
}

#ifdef NUMINOUS_DEBUG
constexpr int kDebugS = kTile * 576, kDebugP = kDebugS + 64 * kTile;  // debug: K [64][576], S [64 heads][64], P [64 heads][64]

template <class R>
__device__ void dump_tile(float* debug, const uint8_t* tile) {
  for (int i = threadIdx.x; i < kTile * R::kPanels * 64; i += kConsumers) {
    const int row = i / (R::kPanels * 64), position = i % (R::kPanels * 64);
    const int dim = dim_of_position(R::kFourBit && position < kLatent, position);
    debug[row * 576 + dim] = bf16_value(*reinterpret_cast<const uint16_t*>(tile + swizzled(kTile, row, position)));
  }
}
#define NUMINOUS_DUMP(statement) \
  if (p.debug != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && tile == w.begin) { statement; }
#else
#define NUMINOUS_DUMP(statement)
#endif

template <class R>
__device__ __forceinline__ void consume_wide(const Params& p, const Work& w, uint8_t* shared) {
  using S = Plan<R, 64, true>;
  const int thread = threadIdx.x % 128, half = uniform(threadIdx.x / 128);
  const uint32_t base = shared_address(shared);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);
  float* stat = reinterpret_cast<float*>(shared + S::kStat);  // [half][head]
  const uint32_t full = base + S::kBarriers, empty = full + 16;

  const uint64_t q_at = descriptor(base + S::kQ, 16, kGroupBytes), p_at = descriptor(base + S::kP, 16, kGroupBytes);
  load_q<R, 64>(p, w, base + S::kQ);
  fence_for_wgmma();
  named_barrier(kAllConsumers, kConsumers);

  float o[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.0f;
  float most[2] = {-kInf, -kInf}, sum[2] = {0.0f, 0.0f};  // of heads fragment_row(thread, 0) and 8 further; sums of own rows only

  for (int tile = w.begin; tile < w.end; ++tile) {
    const int turn = tile - w.begin, buffer = turn & 1;
    const uint32_t k = base + S::kTiles + buffer * R::kTileBytes;
    barrier_wait(full + 8 * buffer, turn >> 1 & 1);
    NUMINOUS_DUMP(dump_tile<R>(p.debug, shared + S::kTiles))

    const uint64_t k_at = descriptor(k + k_major_step(kTile, 32 * half, 0), 16, kGroupBytes);
    const uint64_t v_at = descriptor(k + mn_major_step(4 * half, 0), kTilePanelBytes, kGroupBytes);
    float s[16];  // [head, 32 rows]
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < R::kPanels * 4; ++step)
      wgmma<false, false>(s, further(q_at, k_major_step(64, 0, step)),
                          further(k_at, k_major_step(kTile, 0, step)), step > 0);
    wgmma_commit();
    wgmma_wait();
    hold(s);

    float top[2] = {-kInf, -kInf};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      s[i] += bias[buffer * kTile + 32 * half + fragment_column(thread, i)];
      top[i % 4 / 2] = fmaxf(top[i % 4 / 2], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
      if (thread % 4 == 0) stat[half * 64 + fragment_row(thread, 2 * r)] = top[r];
    }
    named_barrier(kAllConsumers, kConsumers);  // also: P of the tile before is read

    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = stat[(half ^ 1) * 64 + fragment_row(thread, 2 * r)];
      const float now = fmaxf(most[r], fmaxf(top[r], other));
      const float by = exponent_of(p, now);
      // Not exp2 of the difference: that is contracted to an FMA and not 1 where the maximum stays.
      alpha[r] = now == most[r] ? 1.0f : exp2_fast(most[r] * p.scale_log2 - by);
      most[r] = now;
      top[r] = by;
      sum[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const int r = i % 4 / 2;
      const float first = exp2_fast(s[i] * p.scale_log2 - top[r]), second = exp2_fast(s[i + 1] * p.scale_log2 - top[r]);
      sum[r] += first + second;
      store_shared(base + S::kP + swizzled(64, fragment_row(thread, i), 32 * half + fragment_column(thread, i)),
                   bf16_pair(first, second));
      NUMINOUS_DUMP(for (int c = 0; c < 2; ++c) {
        const int at = fragment_row(thread, i) * kTile + 32 * half + fragment_column(thread, i) + c;
        p.debug[kDebugS + at] = c == 0 ? s[i] : s[i + 1];
        p.debug[kDebugP + at] = c == 0 ? first : second;
      })
    }
    fence_for_wgmma();
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] *= alpha[i % 4 / 2];
    }
    named_barrier(kAllConsumers, kConsumers);

    hold(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
      wgmma<false, true>(o, further(p_at, k_major_step(64, 0, step)),
                         further(v_at, mn_major_step(0, step)), true);
    wgmma_commit();
    wgmma_wait();
    hold(o);
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * buffer);
  }

  named_barrier(kAllConsumers, kConsumers);  // maxima are read
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
    // In one order in both warpgroups, so that both have the same factor.
    factor[r] = finish(p, w, head, most[r], stat[head] + stat[64 + head], half == 0 && thread % 4 == 0);
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int dim = dim_of_position(R::kFourBit, 256 * half + fragment_column(thread, i));
    stage[fragment_row(thread, i) * kStageStride + dim] = o[i] * factor[i % 4 / 2];
  }
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
  const uint32_t full = base + S::kBarriers + 8 * group, empty = full + 16;
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

  for (int tile = w.begin + group; tile < w.end; tile += 2) {
    barrier_wait(full, (tile - w.begin) >> 1 & 1);

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
      s[i] += bias[fragment_row(thread, i)];
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
      NUMINOUS_DUMP(const int at = fragment_column(thread, i) * kTile + fragment_row(thread, i);
                    p.debug[kDebugS + at] = s[i]; p.debug[kDebugP + at] = weight)
    }
    NUMINOUS_DUMP(for (int row = thread; row < kTile; row += 128) for (int at = 0; at < R::kPanels * 64; ++at)
        p.debug[row * 576 + dim_of_position(R::kFourBit && at < kLatent, at)] = bf16_value(
            *reinterpret_cast<const uint16_t*>(shared + S::kTiles + swizzled(kTile, row, at))))
    fence_for_wgmma();
    named_barrier(kOneWarpgroup + group, 128);

#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel) hold(o[panel]);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel)
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step)
        wgmma<true, false>(o[panel], further(v_at, mn_major_step(panel, step)),
                           further(p_at, k_major_step(kHeads, 0, step)), true);
    wgmma_commit();
    wgmma_wait();
#pragma unroll
    for (int panel = 0; panel < kLatentPanels; ++panel) hold(o[panel]);
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }

  named_barrier(kOneWarpgroup + group, 128);  // maxima are read
  over_rows<kHeads, false>(sum, stat, thread, kOneWarpgroup + group);
  named_barrier(kAllConsumers, kConsumers);  // all tiles and sums are read
  float* stage = reinterpret_cast<float*>(shared + S::kStage);
  float* theirs = reinterpret_cast<float*>(shared + S::kStat);  // [2][head]: the second warpgroup's maxima and sums
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
      const float factor = finish(p, w, head, now, sum[c] * mine + theirs[kHeads + head] * other, thread < 4);
      mine *= factor;
      other *= factor;
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
    named_barrier(kAllConsumers, kConsumers);
  }
  store_output(p, w, stage, kHeads);
}

// --- Kernels ------------------------------------------------------------------------------------------------------------------

// Threads 0 … 255 consume, the rest produce.
template <class R, int kHeads, bool kWide>
__device__ __forceinline__ void attend(const Params& p) {
  using S = Plan<R, kHeads, kWide>;
  // 32 heads leave no registers for a second warpgroup of producers.
  constexpr int kProducerGroups = kHeads == 16 ? 2 : 1;
  // Registers of a thread: 152 + 2 × 176 = 136 + 2 × 184 = 3 × 168, 2 × 104 + 2 × 152 = 4 × 128.
  constexpr int kProducerRegisters = kWide ? 152 : kHeads == 32 ? 136 : 104;
  constexpr int kConsumerRegisters = kWide ? 176 : kHeads == 32 ? 184 : 152;
  uint8_t* shared = dynamic_shared();
  shared += (1024 - shared_address(shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared), full = base + S::kBarriers, empty = full + 16;
  const Work w = work_of(p, kHeads);
  if (p.splits > 1) start_next_grid();  // `combine` may start when all blocks have come here; it waits for their end

  if (w.begin == w.end && p.splits > 1) {  // nothing to do, and the others do not have to know more
    const int head = w.head + threadIdx.x;
    if (threadIdx.x < kHeads && head < p.heads)
      p.part_lse[(int64_t(w.token) * p.splits + w.split) * p.heads + head] = -kInf;
    return;
  }
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(full + 8 * buffer, 128 * kProducerGroups);
      barrier_init(empty + 8 * buffer, kWide ? 8 : 4);  // warps that read a tile
    }
    fence_after_init();
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    produce<R, kProducerGroups>(p, w, (threadIdx.x - kConsumers) / 128, base + S::kTiles,
                                reinterpret_cast<float*>(shared + S::kBias), full, empty);
  } else {
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

NUMINOUS_KERNEL(wide, 384, 64, true)
NUMINOUS_KERNEL(narrow_32, 384, 32, false)
NUMINOUS_KERNEL(narrow_16, 512, 16, false)

// A head of a token from its splits: weights 2^(lse - largest). Block: a quarter of a head's values. Lanes 8 g … 8 g + 7 of a warp take
// splits g, g + 4, …, so that parts are under way at the same time, 32 consecutive values of each.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ numinous::Params p) {
  using namespace numinous;
  wait_for_grid_before();
  const int64_t token = blockIdx.x / p.heads;
  const int head = blockIdx.x % p.heads;
  constexpr int kGroups = 4;
  const int group = threadIdx.x / 8 % kGroups, column = 4 * int(blockIdx.y * 32 + threadIdx.x / 32 * 8 + threadIdx.x % 8);
  const float* lse = p.part_lse + token * p.splits * p.heads + head;
  const float* part = p.part_out + (token * p.splits * p.heads + head) * kLatent + column;
  float top = -kInf;
  for (int split = group; split < p.splits; split += kGroups) top = fmaxf(top, lse[split * p.heads]);
  for (int lanes = 8; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const float by = top == -kInf ? 0.0f : top;
  float sum = 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 2
  for (int split = group; split < p.splits; split += kGroups) {
    const float own = lse[split * p.heads];
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (own != -kInf) v = *reinterpret_cast<const float4*>(part + int64_t(split) * p.heads * kLatent);  // else it is not written
    const float weight = own == -kInf ? 0.0f : exp2f(own - by);
    sum += weight;
    total = {total.x + weight * v.x, total.y + weight * v.y, total.z + weight * v.z, total.w + weight * v.w};
  }
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
    total = {total.x + __shfl_xor_sync(~0u, total.x, lanes), total.y + __shfl_xor_sync(~0u, total.y, lanes),
             total.z + __shfl_xor_sync(~0u, total.z, lanes), total.w + __shfl_xor_sync(~0u, total.w, lanes)};
  }
  if (group != 0) return;
  const bool none = sum == 0.0f;
  float all = sum;
  if (p.sink != nullptr && !none) all += exp2f(p.sink[head] * kLog2E - by);
  const float factor = none ? 0.0f : 1.0f / all;
  const int64_t row = token * p.heads + head;
  *reinterpret_cast<uint2*>(p.out + row * kLatent + column) =
      uint2{bf16_pair(total.x * factor, total.y * factor), bf16_pair(total.z * factor, total.w * factor)};
  if (column == 0) p.lse[row] = none ? -kInf : (by + log2f(sum)) * kLn2;
}
