// SPDX-License-Identifier: Apache-2.0
//
// Where everything lies: shared memory of a block, operands, fragments. Arithmetic on integers only, for the device and, through a
// C++ compiler without CUDA, for the tests.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define NUMINOUS_HD __host__ __device__ __forceinline__
#else
#define NUMINOUS_HD inline
#endif

namespace numinous {

constexpr int kDim = NUMINOUS_DIM;      // values of a head in q, K and V
constexpr int kRows = 128;              // (token, head of the group) pairs of a cluster
constexpr int kKeys = 64;               // of a tile
constexpr int kPanelDims = 64;          // bf16 values in 128 bytes, the width of a swizzled panel
constexpr int kStageDims = 128;         // values that a stage of the ring has of each key of a tile: two panels
constexpr int kStages = 5;              // of the ring
constexpr int kHalf = kDim / 2;         // values of V of a block
constexpr int kKStages = kDim / kStageDims, kVStages = kHalf / kStageDims;  // of a tile
constexpr int kStagesOfPair = kKStages + 2 * kVStages;                      // of a tile of its own and one of the peer's

constexpr uint32_t kGroupBytes = 1024;  // 8 rows of 128 bytes
constexpr uint32_t kPanelBytes = kKeys * 128;
constexpr uint32_t kStageBytes = 2 * kPanelBytes;
constexpr uint32_t kQPanelBytes = kRows * 128;
constexpr uint32_t kWorkBytes = 64;

static_assert(kDim % (2 * kStageDims) == 0, "a stage has values of one half of V");
// The last stage of a pair that is filled follows one of that pair that is read: whoever reads that is done with the pair before.
static_assert(kStages < kStagesOfPair, "bias is overwritten while it is read");

// Byte of 16-byte chunk `chunk` of row `row` of a panel of 128-byte rows, swizzled by 128 bytes. A panel begins at a multiple of 1024.
NUMINOUS_HD uint32_t swizzled(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row % 8)) * 16); }

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

// Offset of step `k` (16 inner values) of a K-major operand in panels of `panel` bytes.
NUMINOUS_HD uint32_t k_major_step(uint32_t panel, int k) { return uint32_t(k / 4) * panel + uint32_t(k % 4 * 32); }

// Offset of step `k` (16 keys of the tile) of V as MN-major operand.
NUMINOUS_HD uint32_t mn_major_step(int k) { return uint32_t(k * 2048); }

// Row and column of register `i` of a thread of the warpgroup in the accumulator of m64nNk16.
NUMINOUS_HD int fragment_row(uint32_t thread, int i) { return int(thread / 32 * 16 + thread % 32 / 4) + i % 4 / 2 * 8; }
NUMINOUS_HD int fragment_column(uint32_t thread, int i) { return i / 4 * 8 + int(thread % 4 * 2) + i % 2; }

// First tile of rows of a request: ascending whatever the lengths, known without a sum over requests.
NUMINOUS_HD int64_t first_tile(int64_t first_token, int group, int request) { return first_token * group / kRows + request; }

// Shared memory of a block from a multiple of 1024 on; the same in both blocks of a cluster.
struct Plan {
  static constexpr uint32_t kQ = 0;                                    // [panels][128 rows][128 bytes]
  static constexpr uint32_t kRing = kDim / kPanelDims * kQPanelBytes;  // [stages][two panels][64 keys][128 bytes]
  static constexpr uint32_t kInbox = kRing + kStages * kStageBytes;    // the peer's probabilities: [warpgroup][4][128 threads][16 bytes]
  static constexpr uint32_t kInboxBytes = 128 * 64;
  static constexpr uint32_t kExponents = kInbox + 2 * kInboxBytes;     // theirs: [warpgroup][64 rows]
  static constexpr uint32_t kSums = kExponents + 2 * 64 * 4;           // of the peer's tiles, at the end: [warpgroup][64 rows]
  static constexpr uint32_t kBias = kSums + 2 * 64 * 4;                // [2][64 keys]: 0, or -inf for an id that is none
  static constexpr uint32_t kBarriers = kBias + 2 * kKeys * 4;
  static constexpr uint32_t kFull = kBarriers, kEmpty = kFull + 8 * kStages;    // of the stages
  static constexpr uint32_t kBiased = kEmpty + 8 * kStages;                     // [2]
  static constexpr uint32_t kArrived = kBiased + 16, kTaken = kArrived + 16;    // [warpgroup]: messages
  static constexpr uint32_t kWork = kTaken + 16;                                // [warpgroup]
  static constexpr uint32_t kBytes = kWork + 2 * kWorkBytes + 1024;             // the last for the start
  static_assert(kRing % 1024 == 0 && kStageBytes % 1024 == 0, "panels begin at multiples of 1024");
  static_assert(kWork % 8 == 0, "it begins with 64 bits");
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace numinous
