// SPDX-License-Identifier: Apache-2.0
//
// A list, or a part of one, that the blocks of a cluster share, joined in their shared memory: a whole list needs no parts in memory and no
// second kernel, any other fewer parts.
//
// Contract of `join_cluster`. Each block has one part of the list and the same heads. Its consumers, kConsumers threads that have all done so, have written
//   stage [heads][kStageStride]  fp32, what V's products add up to, in units of the tiles, with weights under a score of the block's own and not
//                                divided by any sum; latent value d of head h at [h][d], from whatever fragments the products left it in;
//   tops [heads], sums [heads]   that score, the largest or one near it, and the sum of the weights; a part without rows has -inf, 0 and zeros,
// none of it over what another thread of the block still reads. Each block then reads its share of heads from all of them, and writes
// output and lse, or those of the part. No block ends before all have read.

#pragma once

#include "common.cuh"

namespace numinous {

// `work_of` of Hopper: blocks of whole lists [token, group of heads], then [token, group, split]. Where there are clusters these are whole ones
// in front, too. What divides is mostly 1 or a power of two, and each division is a chain of a hundred cycles and more in front of a block's
// first load, a table's id, which all of its start waits for.
__device__ __forceinline__ Work clustered_work_of(const Params& p, int heads_of_block) {
  const int groups = (p.heads + heads_of_block - 1) / heads_of_block, block = blockIdx.x, whole = p.whole * groups;
  const int parts = block < whole ? 1 : p.splits, log2 = block < whole ? 0 : p.cluster_log2, splits = parts << log2;
  const auto divided = [](uint32_t a, int b) { return b == 1 ? a : a / uint32_t(b); };
  const auto split_up = [&](uint32_t a) { return divided(a >> log2, parts); };
  const int before = block < whole ? 0 : whole, unit = before + int(split_up(block - before));
  const int split = block - before - (unit - before) * splits;
  Work w;
  w.token = int(divided(unit, groups));
  w.head = (unit - w.token * groups) * heads_of_block;
  w.blocks = 1 << log2;
  w.part = parts == 1 ? -1 : (w.token - p.whole) * parts + (split >> log2);
  w.request = int(divided(w.token, p.queries));
  w.query = w.token - w.request * p.queries;
  w.length = p.lengths == nullptr ? p.width : visible(p.lengths[w.request], p.queries, w.query, p.width);
  const uint32_t tiles = tiles_of(w.length);
  w.begin = int(split_up(tiles * split));
  w.end = int(split_up(tiles * (split + 1)));
  return w;
}

// The warp's units, each a head or a part of it: a lane has kPieces times four values. `weight` is what a lane has of the blocks' weights.
template <int kPieces>
__device__ __forceinline__ void join_units(const Params& p, const Work& w, const float* stage, float weight, int rank, int warp, int warps,
                                           int heads) {
  constexpr int kParts = 4 / kPieces, kAhead = kPieces == 4 ? 2 : 4;  // loads under way: eight of 16 bytes
  const int lane = threadIdx.x % 32, blocks = w.blocks;
  for (int turn = 0, unit = warp; unit < heads * kParts; ++turn, unit += warps) {
    const int head = unit / kParts, first = 4 * lane + unit % kParts * kPieces * 128;
    const float* own = stage + head * kStageStride + first;
    float4 out[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) out[k] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Each block begins with itself, so that no two read from one at a time; for a head it is always the same order.
    for (int i = 0; i < blocks; i += kAhead) {
      float4 v[kAhead][kPieces];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const float* at = in_block(own, (rank + i + a) & (blocks - 1));
#pragma unroll
        for (int k = 0; k < kPieces; ++k)
          if (a < 2 || i + a < blocks) v[a][k] = *reinterpret_cast<const float4*>(at + 128 * k);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const float by = __shfl_sync(~0u, weight, turn * blocks + (rank + i + a & (blocks - 1)));
        if (a < 2 || i + a < blocks)
#pragma unroll
          for (int k = 0; k < kPieces; ++k)
            out[k] = {out[k].x + by * v[a][k].x, out[k].y + by * v[a][k].y, out[k].z + by * v[a][k].z, out[k].w + by * v[a][k].w};
      }
    }
    const int64_t to = w.row_of(p, head) * kLatent + first;
#pragma unroll
    for (int k = 0; k < kPieces; ++k)
      if (w.part < 0) {
        *reinterpret_cast<uint2*>(p.out + to + 128 * k) = uint2{bf16_pair(out[k].x, out[k].y), bf16_pair(out[k].z, out[k].w)};
      } else {
        *reinterpret_cast<float4*>(p.part_out + to + 128 * k) = out[k];
      }
  }
}

// By all consumers of all blocks of the cluster; producers may have ended.
__device__ __forceinline__ void join_cluster(const Params& p, const Work& w, const float* stage, const float* tops, const float* sums,
                                             int heads_of_block) {
  cluster_barrier();
  const int blocks = w.blocks, rank = cluster_rank(), lane = threadIdx.x % 32;
  const int warps = kConsumers / 32 * blocks, warp = kConsumers / 32 * rank + threadIdx.x / 32;
  const int heads = min(heads_of_block, p.heads - w.head);
  const int parts = warps >= 4 * heads ? 2 : warps >= 2 * heads ? 1 : 0;  // a unit is a head, a half or a quarter: 2 to this

  // Lane turn · blocks + b has the weight of block b in the warp's unit of that turn: of 64 heads and two blocks four turns, eight lanes;
  // it is never more than a warp has.
  const int unit = warp + (lane >> p.cluster_log2) * warps, from = lane & (blocks - 1), head = unit >> parts;
  const bool live = head < heads;
  float top = -kInf, sum = 0.0f;
  if (live) {
    top = in_block(tops, from)[head];
    sum = in_block(sums, from)[head];
  }
  float most = top;
  for (int lanes = 1; lanes < blocks; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
  float weight = exp2_fast(top * p.scale_log2 - exponent_of(p, most)), total = weight * sum;
  for (int lanes = 1; lanes < blocks; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
  weight *= finish(p, w, head, most, total, live && from == 0 && unit == head << parts);

  if (parts == 0) join_units<4>(p, w, stage, weight, rank, warp, warps, heads);
  if (parts == 1) join_units<2>(p, w, stage, weight, rank, warp, warps, heads);
  if (parts == 2) join_units<1>(p, w, stage, weight, rank, warp, warps, heads);
  cluster_leave();
}

}  // namespace numinous
