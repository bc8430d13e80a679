// SPDX-License-Identifier: Apache-2.0
//
// What every architecture's kernel shares: arguments, work of a block, rows of the pool and their decoding, q, the output, `combine`.
// Whoever includes this has included `layout.cuh` and the instructions of its architecture.

#pragma once

#include <cmath>

#include "layout.cuh"

namespace numinous {

struct Params {
  const uint16_t* q;       // bf16 [requests, queries, heads, 512 + rope]
  const uint8_t* pool;
  const void* index;       // ids [tokens, width], or pages [requests, width / 64]; int32 or int64
  const int* lengths;      // [requests], dense only
  const float* sink;       // [heads], or null
  uint16_t* out;           // bf16 [tokens, heads, 512]
  float* lse;              // [tokens, heads], natural
  float* part_out;         // [tokens - whole, splits, heads, 512]
  float* part_lse;         // [tokens - whole, splits, heads], base 2
  float* debug;
  int64_t q_request_stride, q_query_stride, q_head_stride;  // elements
  int64_t pool_stride;                                      // bytes
  int64_t index_stride;                                     // elements from token to token, dense: from request to request
  int64_t slots;
  int tokens, queries, heads, width;
  int whole, splits;  // the first tokens have one block for each group of heads, which writes the output; the others have `splits`
  int cluster_log2;   // not 0: each of these splits is a cluster of blocks, 2 to this, which join it; one split is the output. Hopper only
  int wide_ids;
  float scale_log2;   // of scores of what tiles hold, times log2(e)
  float out_scale;    // from what tiles hold to values
  uint32_t q_factor;  // pair of bf16 that multiplies the latent part of q: a power of two
};

constexpr int kConsumers = 256;
constexpr float kInf = INFINITY;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Work {
  int token, request, query, head, begin, end, length;  // tiles begin … end of a list of `length` entries
  int part;    // which of all parts [tokens - whole, splits] the block writes; negative: the output
  int blocks;  // of a cluster, which have the list's parts and join them; else 1

  // Row of a head of the block in the output, or in parts.
  __device__ __forceinline__ int64_t row_of(const Params& p, int head_of_block) const {
    return int64_t(part < 0 ? token : part) * p.heads + head + head_of_block;
  }
};

// Blocks of one list stand side by side: they run at the same time, so that a row that one has read comes to the others from L2.
__device__ __forceinline__ Work work_of(const Params& p, int heads_of_block) {
  Work w;
  const int groups = (p.heads + heads_of_block - 1) / heads_of_block, list = blockIdx.x / groups;
  w.head = blockIdx.x % groups * heads_of_block;
  w.part = list - p.whole;
  w.blocks = 1;
  w.token = w.part < 0 ? list : p.whole + w.part / p.splits;
  w.request = w.token / p.queries;
  w.query = w.token % p.queries;
  w.length = p.lengths == nullptr ? p.width : visible(p.lengths[w.request], p.queries, w.query, p.width);
  const int tiles = tiles_of(w.length), splits = w.part < 0 ? 1 : p.splits, split = w.part < 0 ? 0 : w.part % p.splits;
  w.begin = first_tile(tiles, splits, split);
  w.end = first_tile(tiles, splits, split + 1);
  return w;
}

// Whether a block has a part without rows, which it says; the others do not have to know more.
__device__ __forceinline__ bool no_part(const Params& p, const Work& w, int heads_of_block) {
  if (w.part < 0 || w.begin < w.end) return false;
  if (threadIdx.x < heads_of_block && w.head + int(threadIdx.x) < p.heads) p.part_lse[w.row_of(p, threadIdx.x)] = -kInf;
  return true;
}

// --- Rows ---------------------------------------------------------------------------------------------------------------------

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
    const uint8_t* row = settled(p.pool + (valid ? slot : 0) * p.pool_stride);
    const uint8_t* mine = settled(row + 16 * quarter);  // chunk_of(quarter, k) is quarter + 4k
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
      const float size[2] = {fabsf(scale.x) * kScaleUnit, fabsf(scale.y) * kScaleUnit};  // the sign is not the scale's
      const uint32_t scales[2] = {bf16_pair(size[0], size[0]), bf16_pair(size[1], size[1])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t codes = word(raw.codes[k], j), by = scales[j / 2];
        store_shared(stored<R>(first, k, j),
                     uint4{multiply_bf16_pairs(e2m1_pair(codes, 0), by), multiply_bf16_pairs(e2m1_pair(codes, 1), by),
                           multiply_bf16_pairs(e2m1_pair(codes, 2), by), multiply_bf16_pairs(e2m1_pair(codes, 3), by)});
      }
    }
    if constexpr (R::kRope) {
      // A quarter of the rope part is a group, and has eight scales side by side.
      const uint4 four = quarter & 2 ? raw.scales[1] : raw.scales[0];
      const uint32_t step = quarter & 1 ? step_pair(four.z, four.w) : step_pair(four.x, four.y);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t one = word(raw.rope[0], 2 * half), two = word(raw.rope[0], 2 * half + 1);
        store_shared(tile + swizzled(kTile, row, kLatent + 16 * quarter + 8 * half),
                     uint4{multiply_bf16_pairs(int8_pair(permute_bytes(one, 0x9180)), step),
                           multiply_bf16_pairs(int8_pair(permute_bytes(one, 0xb3a2)), step),
                           multiply_bf16_pairs(int8_pair(permute_bytes(two, 0x9180)), step),
                           multiply_bf16_pairs(int8_pair(permute_bytes(two, 0xb3a2)), step)});
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

// --- q and the output -----------------------------------------------------------------------------------------------------------

// What is subtracted from exponents under a largest score: that score, but never infinity from infinity.
__device__ __forceinline__ float exponent_of(const Params& p, float most) {
  return most == -kInf ? 0.0f : most * p.scale_log2;
}

// A score under its row's bias. Not their sum: a row that is none has zeros, and NaN or infinity in q times these is NaN.
__device__ __forceinline__ float biased(float score, float bias) { return bias == 0.0f ? score : bias; }

// Heads head … head + kHeads of q into panels, in the order in which tiles hold a row; heads that are none as zeros. A warp takes every
// eighth head, whose swizzle is then the same, and a lane two chunks of its latent part, eight lanes one of its rope part: addresses are
// one sum and constants, because code that runs once is paid for by the line.
template <class R, int kHeads>
__device__ __forceinline__ void load_q(const Params& p, const Work& w, uint32_t to) {
  constexpr int kWarps = kConsumers / 32, kTurns = kHeads / kWarps, kChunks = R::kRope ? 3 : 2;
  static_assert(kWarps == 8 && kHeads % kWarps == 0, "heads of a warp have one swizzle");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  const uint32_t first = to + swizzled(kHeads, warp, 8 * lane);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      uint4 v = all[turn][k];
      if (k < 2) {
        v = {multiply_bf16_pairs(v.x, p.q_factor), multiply_bf16_pairs(v.y, p.q_factor), multiply_bf16_pairs(v.z, p.q_factor),
             multiply_bf16_pairs(v.w, p.q_factor)};
        if constexpr (R::kFourBit)  // dim_of_position: values i and i + 4 side by side
          v = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
               __byte_perm(v.y, v.w, 0x7632)};
      }
      const uint32_t at = first + turn * kWarps * 128 + k * (kLatentPanels / 2) * kHeads * 128;
      if (k < 2 || lane < 8) store_shared(at, v);
    }
}

// The stage's heads to memory: final, or a split's part.
__device__ __forceinline__ void store_output(const Params& p, const Work& w, const float* stage, int heads_of_block) {
  const int heads = min(heads_of_block, p.heads - w.head);
  for (int i = threadIdx.x; i < heads * (kLatent / 4); i += kConsumers) {
    const int head = i / (kLatent / 4), four = i % (kLatent / 4);
    const float4 v = *reinterpret_cast<const float4*>(stage + head * kStageStride + 4 * four);
    const int64_t at = w.row_of(p, head) * kLatent + 4 * four;
    if (w.part < 0) {
      *reinterpret_cast<uint2*>(p.out + at) = uint2{bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    } else {
      *reinterpret_cast<float4*>(p.part_out + at) = v;
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
    if (w.part < 0) {
      if (writes) p.lse[w.row_of(p, head)] = lse * kLn2;
      if (p.sink != nullptr && !none) total += exp2f(p.sink[w.head + head] * kLog2E - top);
    } else if (writes) {
      p.part_lse[w.row_of(p, head)] = lse;
    }
  }
  return none ? 0.0f : p.out_scale / total;
}

}  // namespace numinous

// --- Splits -------------------------------------------------------------------------------------------------------------------

namespace numinous {

// Sum over some splits of eight values of a head, weighted by 2^(lse - most).
struct Joined {
  float most, sum;
  float4 low, high;

  __device__ __forceinline__ float by() const { return most == -kInf ? 0.0f : most; }
  // The largest lse so far is `now`.
  __device__ __forceinline__ void rise(float now) {
    const float before = most;
    most = now;
    const float keep = exp2f(before - by());
    sum *= keep;
    low = {low.x * keep, low.y * keep, low.z * keep, low.w * keep};
    high = {high.x * keep, high.y * keep, high.z * keep, high.w * keep};
  }
  __device__ __forceinline__ void add(float weight, float total, const float4& v, const float4& w) {
    sum += weight * total;
    low = {low.x + weight * v.x, low.y + weight * v.y, low.z + weight * v.z, low.w + weight * v.w};
    high = {high.x + weight * w.x, high.y + weight * w.y, high.z + weight * w.z, high.w + weight * w.w};
  }
};

}  // namespace numinous

// A head of a token from its splits, always in the same order. 64 threads have eight values each; where there are many splits, four such
// groups take every fourth one and meet in shared memory. What a thread loads depends on nothing that it has loaded.
extern "C" __global__ void __launch_bounds__(64 * numinous::kJoinGroups) combine(const __grid_constant__ numinous::Params p) {
  using namespace numinous;
  wait_for_grid_before();
  const int groups = groups_of_join(p.splits), group = threadIdx.x / 64, thread = threadIdx.x % 64;
  const int64_t list = blockIdx.x / p.heads, token = p.whole + list;
  const int head = blockIdx.x % p.heads;
  const float* lse = p.part_lse + list * p.splits * p.heads + head;
  const float* part = p.part_out + (list * p.splits * p.heads + head) * kLatent + 4 * thread;
  Joined joined = {-kInf, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  constexpr int kAhead = 4;
  for (int first = group; first < p.splits; first += kAhead * groups) {
    float own[kAhead];
    float4 low[kAhead], high[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int split = first + i * groups;
      own[i] = -kInf;
      if (split < p.splits) {
        own[i] = lse[split * p.heads];
        const float* from = part + int64_t(split) * p.heads * kLatent;
        low[i] = *reinterpret_cast<const float4*>(from);
        high[i] = *reinterpret_cast<const float4*>(from + kLatent / 2);
      }
    }
    float now = joined.most;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) now = fmaxf(now, own[i]);
    joined.rise(now);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (own[i] != -kInf) joined.add(exp2f(own[i] - joined.by()), 1.0f, low[i], high[i]);  // else the part is not written
  }
  if (groups > 1) {
    __shared__ Joined others[kJoinGroups - 1][64];
    if (group > 0) others[group - 1][thread] = joined;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int i = 0; i < kJoinGroups - 1; ++i) {
      const Joined& other = others[i][thread];
      joined.rise(fmaxf(joined.most, other.most));
      joined.add(exp2f(other.most - joined.by()), other.sum, other.low, other.high);
    }
  }
  const bool none = joined.sum == 0.0f;
  const float by = joined.by();
  float all = joined.sum;
  if (p.sink != nullptr && !none) all += exp2f(p.sink[head] * kLog2E - by);
  const float factor = none ? 0.0f : 1.0f / all;
  const float4 low = joined.low, high = joined.high;
  uint16_t* out = p.out + (token * p.heads + head) * kLatent + 4 * thread;
  *reinterpret_cast<uint2*>(out) = uint2{bf16_pair(low.x * factor, low.y * factor), bf16_pair(low.z * factor, low.w * factor)};
  *reinterpret_cast<uint2*>(out + kLatent / 2) =
      uint2{bf16_pair(high.x * factor, high.y * factor), bf16_pair(high.z * factor, high.w * factor)};
  if (thread == 0) p.lse[token * p.heads + head] = none ? -kInf : (by + log2f(joined.sum)) * kLn2;
}
