// SPDX-License-Identifier: Apache-2.0
//
// Where everything lies: rows, shared memory, fragments, splits. Arithmetic on integers only, for the device and, through a C++
// compiler without CUDA, for the tests, which check each function against a written model of WGMMA's operands.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define NUMINOUS_HD __host__ __device__ __forceinline__
#else
#define NUMINOUS_HD inline
#endif

namespace numinous {

constexpr int kTile = 64;        // rows of a K tile
constexpr int kHalf = kTile / 2; // rows that are filled and given back together, where a tile is so by halves
constexpr int kLatent = 512;     // latent values of a row: all of V
constexpr int kPanelDims = 64;   // bf16 values in 128 bytes, the width of a swizzled panel
constexpr int kLatentPanels = kLatent / kPanelDims;
constexpr int kThreadsOfRow = 4;                            // producers that share a row
constexpr int kRowsOfPass = 128 / kThreadsOfRow;            // rows that a producer warpgroup has in hand at a time
constexpr int kTilePanelBytes = kTile * 2 * kPanelDims;     // 8192

// Rows by their width in bytes. What tiles hold of 4-bit rows: see *Numbers*.
template <int kWidth>
struct Row {
  static_assert(kWidth == 352 || kWidth == 288 || kWidth == 656 || kWidth == 528, "no such row");
  static constexpr int kBytes = kWidth;
  static constexpr bool kFourBit = kWidth == 352 || kWidth == 288;
  static constexpr bool kRope = kWidth == 352 || kWidth == 656;
  static constexpr int kScaleAt = kFourBit ? 256 : 512;
  static constexpr int kRopeAt = kFourBit ? 288 : 528;
  static constexpr int kChunks = kFourBit ? 4 : 8;  // of 16 bytes of codes that a producer has of a row
  static constexpr int kPanels = kLatentPanels + (kRope ? 1 : 0);
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
};

// --- Shared memory ----------------------------------------------------------------------------------------------------------

// Byte of element (row, position) of a matrix whose panels have `rows` rows of 128 bytes, swizzled by 128 bytes: 16-byte chunk
// `c` of row r lies where chunk c ^ (r % 8) would. A panel begins at a multiple of 1024.
NUMINOUS_HD uint32_t swizzled(uint32_t rows, uint32_t row, uint32_t position) {
  const uint32_t panel = position / kPanelDims, chunk = position % kPanelDims / 8;
  return panel * rows * 128 + row * 128 + ((chunk ^ (row % 8)) * 16) + position % 8 * 2;
}

// Where a producer stores its chunks of eight values of a row, from `swizzled` of its first on: chunk `j` of code chunk `k`.
template <class R>
NUMINOUS_HD uint32_t stored(uint32_t first, int k, int j) {
  return (first ^ uint32_t(16 * j)) + uint32_t(k * (R::kFourBit ? 2 : 1) * kTilePanelBytes);
}

// Descriptor of a WGMMA operand with 128-byte swizzle. `address` is the shared-memory address in bytes.
//   K-major (the product's inner dimension contiguous): groups of 8 rows `stride` bytes apart, `leading` unused.
//   MN-major: 64 contiguous outer values a panel, panels `leading` bytes apart; groups of 8 inner values `stride` bytes apart.
NUMINOUS_HD uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
         uint64_t((stride & 0x3ffff) >> 4) << 32 | uint64_t(1) << 62;
}

// The descriptor of what lies `offset` bytes further; below 2^18 nothing is carried out of the address's bits.
NUMINOUS_HD uint64_t further(uint64_t descriptor, uint32_t offset) {
  return descriptor & 0xffffffff00000000u | uint32_t(uint32_t(descriptor) + (offset >> 4));
}

constexpr uint32_t kGroupBytes = 1024;  // 8 rows of 128 bytes

// Offset of step `k` (16 inner values) of a K-major operand whose panels have `rows` rows, from row `first` on (a multiple of 8).
NUMINOUS_HD uint32_t k_major_step(int rows, int first, int k) {
  return uint32_t(k / 4 * rows * 128 + first * 128 + k % 4 * 32);
}

// Offset of step `k` (16 rows of the tile) of V as MN-major operand, from panel `panel` on.
NUMINOUS_HD uint32_t mn_major_step(int panel, int k) { return uint32_t(panel * kTilePanelBytes + k * 2048); }

constexpr int kStageStride = kLatent + 4;  // floats: rows of the output's stage fall into different banks

// Shared memory of a block from a multiple of 1024 on.
template <class R, int kHeads, bool kWide>
struct Plan {
  static constexpr int kQPanelBytes = kHeads * 128;
  static constexpr int kQ = 0;
  static constexpr int kTiles = R::kPanels * kQPanelBytes;
  static constexpr int kP = kTiles + 2 * R::kTileBytes;       // probabilities: wide one of all consumers, narrow one of each warpgroup
  static constexpr int kPBytes = kHeads * 128;
  static constexpr int kBias = kP + (kWide ? 1 : 2) * kPBytes;  // [2][64]: 0, or -inf for a row that is none
  static constexpr int kStat = kBias + 2 * kTile * 4;           // [256]: maxima and sums under exchange
  static constexpr int kBarriers = kStat + 256 * 4;             // full[2][2], empty[2][2] of halves of tiles, wide: peaked, weighed
  static constexpr int kBytes = kBarriers + 10 * 8 + 1024;      // the last for the start
  static constexpr int kStage = kTiles;                         // output, fp32 [heads][kStageStride], when all tiles are read
  static_assert(kTiles % 1024 == 0 && R::kTileBytes % 1024 == 0 && kPBytes % 1024 == 0, "panels begin at multiples of 1024");
  static_assert(kHeads * kStageStride * 4 <= kBias - kStage, "the output's stage does not fit");
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
};

// Shared memory of a block of kernel_packed.cu from a multiple of 1024 on: rows stay packed, in a ring of stages.
constexpr int kScaleLine = 40;  // words of a block scale of all rows of a tile: 64 bf16 and a gap, so that lines fall into different banks

// Word of block `block` in a stage's scales. Eight blocks more move by eight words further, so that producers do not meet in a bank either.
NUMINOUS_HD int scale_line(int block) { return block * kScaleLine + block / 8 * 8; }
// Rows `pair` and `pair` + 8 of 16 share a word of a line: two words side by side are what a thread multiplies V's values by.
NUMINOUS_HD int scale_word(int pair) { return pair % 4 * 2 + pair / 4; }

template <class R, int kHeads>
struct PackedPlan {
  static_assert(R::kFourBit, "scales are those of 4-bit rows");
  static constexpr int kQ = 0;
  static constexpr int kP = R::kPanels * kHeads * 128;  // probabilities of each warpgroup's tile, [head][row]
  static constexpr int kPBytes = kHeads * 128;
  static constexpr int kStages = kP + 2 * kPBytes;
  static constexpr int kScales = kTile * R::kBytes;  // in a stage, behind its rows
  static constexpr int kStageBytes = kScales + 4 * (32 * kScaleLine + 24);
  static constexpr int kRest = 4 * kHeads * 4 + 16 + 7 * 4 * 4 + 16 * 8 + 1024;
  static constexpr int kFit = (232448 - kRest - kStages) / kStageBytes;
  static constexpr int kCount = kFit < 7 ? kFit : 7;
  static constexpr int kFlight = kCount - 2;  // tiles under way; one more is at work twice, once as S and once as O
  static constexpr int kMost = kStages + kCount * kStageBytes;  // [head] largest scores
  static constexpr int kBy = kMost + kHeads * 4;                // [head] what is subtracted from exponents
  static constexpr int kAlpha = kBy + kHeads * 4;               // [2][head] of a tile: what sums and output before it are multiplied by
  static constexpr int kChanged = kAlpha + 2 * kHeads * 4;      // [2] whether any of these is not 1
  static constexpr int kMasks = kChanged + 16;                  // [stage][warp]: which of 16 rows are rows
  static constexpr int kBarriers = kMasks + kCount * 16;        // full[kCount], empty[kCount], weighed[2]
  static constexpr int kBytes = kBarriers + (2 * kCount + 2) * 8 + 1024;  // the last for the start
  // When all tiles are read:
  static constexpr int kStage = kQ;                   // output, fp32 [heads][kStageStride], where a cluster joins it
  static constexpr int kSums = kMost - 8 * kHeads * 4;  // [warp of eight][head]
  static_assert(kHeads * kStageStride * 4 <= kSums - kStage, "the output's stage does not fit");
  static_assert(kCount >= 4 && kBytes <= 232448, "more shared memory than a block can have");
  static_assert(kPBytes % 1024 == 0 && kStageBytes % 16 == 0 && kBarriers % 8 == 0, "alignment");
};

// --- Who does what ----------------------------------------------------------------------------------------------------------

// Producer `thread` of a tile: its row in pass `pass` of warpgroup `group` of `groups`, and which quarter of the row. Eight
// threads that store together have rows that differ modulo 8, so that the swizzle sends them to different banks.
NUMINOUS_HD int producer_row(uint32_t thread, int group, int groups, int pass) {
  return (pass * groups + group) * kRowsOfPass + int(thread / 32 * 8 + thread % 8);
}
NUMINOUS_HD int producer_quarter(uint32_t thread) { return int(thread % 32 / 8); }

// Chunk of 16 bytes of codes that quarter `quarter` has as its `k`-th.
NUMINOUS_HD int chunk_of(int quarter, int k) { return quarter + kThreadsOfRow * k; }

// Which latent value stands at a position of a tile, within eight: mask and shift give nibbles i and i + 4 as a pair.
NUMINOUS_HD int dim_of_position(bool four_bit, int position) {
  return four_bit ? (position & ~7) | (position & 1) << 2 | (position & 7) >> 1 : position;
}

// Row and column of register `i` of a thread of the warpgroup in the accumulator of m64nNk16.
NUMINOUS_HD int fragment_row(uint32_t thread, int i) { return int(thread / 32 * 16 + thread % 32 / 4) + i % 4 / 2 * 8; }
NUMINOUS_HD int fragment_column(uint32_t thread, int i) { return i / 4 * 8 + int(thread % 4 * 2) + i % 2; }

// --- Splits -----------------------------------------------------------------------------------------------------------------

NUMINOUS_HD int tiles_of(int length) { return length / kTile + (length % kTile != 0); }

// First tile of a split; that of split `splits` is the end. Fewer than 2^25 tiles, at most 64 splits: a quotient of 32 bits, the other takes a
// block a hundred instructions.
NUMINOUS_HD int first_tile(int tiles, int splits, int split) { return int(uint32_t(tiles) * uint32_t(split) / uint32_t(splits)); }

// Groups of 64 threads that join a head's splits.
constexpr int kJoinGroups = 4;
NUMINOUS_HD int groups_of_join(int splits) { return splits <= 4 ? 1 : kJoinGroups; }

// Entries of its list that query `query` of `queries` of a request sees in dense addressing: causal, the last one sees all.
NUMINOUS_HD int visible(int length, int queries, int query, int width) {
  const int seen = length - (queries - 1 - query);
  return seen < 0 ? 0 : seen > width ? width : seen;
}

// --- Numbers ----------------------------------------------------------------------------------------------------------------

// Codes i and i + 4 of a word of eight E2M1 codes as a pair of bf16 in units of 2^126: sign to bit 15, the three bits of the
// magnitude to bits 6 … 8, where they read as exponent and mantissa, subnormals included.
NUMINOUS_HD uint32_t e2m1_pair(uint32_t word, int i) {
  const uint32_t magnitude = i == 0 ? word << 6 : i == 1 ? word << 2 : i == 2 ? word >> 2 : word >> 6;
  return (magnitude & 0x01c001c0u) | ((word << (12 - 4 * i)) & 0x80008000u);
}

// The same by a product, which takes shifts off the pipe that masks need: a nibble alone in its half, twice, six bits apart, lies with its
// magnitude at bits 6 … 8 and with its sign at bit 15.
NUMINOUS_HD uint32_t e2m1_pair_by_product(uint32_t word, int i) {
  const uint32_t from = i < 2 ? word : word >> 8;
  return ((i % 2 == 0 ? (from & 0x000f000fu) * 0x1040u : (from & 0x00f000f0u) * 0x0104u)) & 0x81c081c0u;
}

// Step of a rope group as a pair of bf16 in units of 2^-121, from its eight block scales: sign bits 0 … 6 become bits 7 … 13, all of the
// exponent but its highest, which is set. Four sign bits times the sum of 2^0, 2^7, 2^14 and 2^21 stand in order in the upper four.
NUMINOUS_HD uint32_t step_pair(uint32_t first_four, uint32_t last_four) {
  const uint32_t low = (first_four & 0x80808080u) * 0x00204081u, high = (last_four & 0x80808080u) * 0x00204081u;
  return ((low >> 21 & 0x0780u) | (high >> 17 & 0x3800u) | 0x4000u) * 0x00010001u;
}

// INT8 codes whose bytes have been spread to halves with their signs above them: a pair of bf16 in units of 2^133. Seven bits of magnitude
// are the mantissa of a subnormal.
NUMINOUS_HD uint32_t int8_pair(uint32_t spread) { return spread & 0x807f807fu; }

// Tiles hold 4-bit rows times 2^-12: a block scale × 2^126 alone would overflow bf16. For the rope part 133 - 121 is 12 already.
constexpr float kScaleUnit = 0x1p114f;  // 126 - 12

}  // namespace numinous
