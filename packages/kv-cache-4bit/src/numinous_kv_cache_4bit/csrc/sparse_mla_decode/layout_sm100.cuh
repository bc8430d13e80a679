// SPDX-License-Identifier: Apache-2.0
//
// What `layout.cuh` does not have of sm_100a: descriptors of tcgen05, shared memory, tensor memory. Integers only, for the tests, too.

#pragma once

#include "layout.cuh"

namespace numinous {

// Descriptor of a tcgen05 operand with 128-byte swizzle (PTX ISA, 9.7.16, "Shared memory descriptor"), arguments as in `descriptor`:
//   bits  0 … 13  address / 16            bits 46 … 48  0b001, "fixed": a WGMMA descriptor has zeros here
//   bits 16 … 29  leading / 16            bits 49 … 51  base offset: 0, panels begin at multiples of 1024
//   bits 32 … 45  stride / 16             bit  52       leading is a distance: 0
//                                         bits 53 … 60  0
//                                         bits 61 … 63  2, 128-byte swizzle: the bit that WGMMA has as 1 from bit 62 on
NUMINOUS_HD uint64_t tcgen05_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return descriptor(address, leading, stride) | uint64_t(1) << 46;
}

// Instruction descriptor of kind::f16 (same manual, "Instruction descriptor"):
//   bits 0 … 3  0: dense                  bits 13, 14    0: nothing negated
//   bits 4, 5   1: D in fp32              bit  15        A is MN-major ("transpose")
//   bit  6      0                         bit  16        B is MN-major: never here
//   bits 7 … 9  1: A in bf16              bits 17 … 22   N / 8
//   bits 10 … 12  1: B in bf16            bits 24 … 28   M / 16; 23 and 29 … 31 are 0
constexpr NUMINOUS_HD uint32_t instruction_of(int m, int n, bool mn_major_a) {
  return 1u << 4 | 1u << 7 | 1u << 10 | uint32_t(mn_major_a) << 15 | uint32_t(n / 8) << 17 | uint32_t(m / 16) << 24;
}

constexpr int kOutRows = 128;                            // M of Oᵀ = Vᵀ · Pᵀ: latent values of a product
constexpr int kOutParts = kLatent / kOutRows;
constexpr int kPanelsOfPart = kOutRows / kPanelDims;

// Tensor memory, columns of fp32: O [4 × 128 latent values, heads], then S [64 rows, heads] twice. M 128 fills all 128 lanes, value
// for value; M 64 has row r in lane 32 (r / 16) + r % 16, so that a warp of four has the 16 rows that it has in WGMMA.
template <int kHeads>
struct TensorPlan {
  static constexpr int kOut = 0;
  static constexpr int kScores = kOutParts * kHeads;
  static constexpr int kUsed = kScores + 2 * kHeads;
  static constexpr int kColumns = kUsed <= 128 ? 128 : kUsed <= 256 ? 256 : 512;  // what can be allocated: powers of two
  static_assert(kUsed <= 512, "more tensor memory than there is");
};

// The address of a column in the quarter of lanes that warp `warp` of four can reach.
NUMINOUS_HD uint32_t quarter_at(uint32_t column, int warp) { return column + (uint32_t(32 * warp) << 16); }

// Shared memory of a block from a multiple of 1024 on: that of `Plan`, narrow, with one P and other barriers.
template <class R, int kHeads>
struct TensorBlockPlan {
  static constexpr int kQ = 0;
  static constexpr int kTiles = R::kPanels * kHeads * 128;
  static constexpr int kP = kTiles + 2 * R::kTileBytes;  // probabilities [heads][64 rows]
  static constexpr int kBias = kP + kHeads * 128;        // [2][64]: 0, or -inf for a row that is none
  static constexpr int kStat = kBias + 2 * kTile * 4;    // [4 warps][heads]: maxima and sums under exchange
  static constexpr int kBarriers = kStat + 256 * 4;      // full[2], empty[2], scored[2], weighed, asked
  static constexpr int kAddress = kBarriers + 8 * 8;     // of the tensor memory
  static constexpr int kBytes = kAddress + 8 + 1024;     // the last for the start
  static constexpr int kStage = kTiles;                  // output, fp32 [heads][kStageStride], when all tiles are read
  static_assert(kTiles % 1024 == 0 && R::kTileBytes % 1024 == 0 && kP % 1024 == 0, "panels begin at multiples of 1024");
  static_assert(kHeads * kStageStride * 4 <= kBias - kStage, "the output's stage does not fit");
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace numinous
