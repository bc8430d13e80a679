// SPDX-License-Identifier: Apache-2.0
//
// `sm90_model.h` with the matrix products of a warp, in place of csrc/sparse_mla_decode/mma.cuh: which element of a matrix which
// register of which lane is, as the PTX manual draws it for ldmatrix and for mma.m16n8k16 of bf16, written anew.

#pragma once

#include "sm90_model.h"

namespace model {

struct Words { uint32_t at[6]; };

// What each lane of the warp brings to an instruction that all lanes execute together.
inline const Words* together(const Words& own) {
  // A lane may bring its next words while others still read these, but cannot get to those after the next.
  static std::vector<Words> brought[2];
  const unsigned first = block.current / 32 * 32, turn = block.warps[block.current / 32].generation % 2;
  if (brought[turn].size() < block.threads) brought[turn].resize(block.threads);
  brought[turn][block.current] = own;
  exchanged(0, 0);
  return brought[turn].data() + first;
}

inline uint16_t half_of(uint32_t pair, int i) { return uint16_t(i == 0 ? pair : pair >> 16); }

}  // namespace model

namespace numinous {

// ldmatrix .x4: lane 8 m + r has the address of row r of matrix m, 16 bytes. Lane l receives of row l / 4 elements 2 (l % 4) and one
// further; with .trans of column l / 4 the elements of rows 2 (l % 4) and one further. The first is the lower half.
template <bool kTransposed>
void load_matrices(uint32_t (&v)[4], uint32_t row_at) {
  const model::Words* lanes = model::together({{row_at}});
  const int lane = int(model::block.current % 32);
  for (int m = 0; m < 4; ++m) {
    uint16_t element[2];
    for (int i = 0; i < 2; ++i) {
      const int across = lane / 4, along = lane % 4 * 2 + i;
      const uint32_t address = lanes[8 * m + (kTransposed ? along : across)].at[0];
      std::memcpy(&element[i], model::at(address, 16) + 2 * (kTransposed ? across : along), 2);
    }
    v[m] = element[0] | uint32_t(element[1]) << 16;
  }
}

// mma.m16n8k16, with g = lane / 4 and t = lane % 4. Element i of a lane's A is in row g, from i = 2 on 8 further where i % 4 ≥ 2, and
// column 2 t + i % 2, 8 further for i ≥ 4; of B in row 2 t + i % 2, 8 further for i ≥ 2, and column g; of C in row g, 8 further
// for i ≥ 2, and column 2 t + i % 2.
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const model::Words* lanes = model::together({{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = int(model::block.current % 32);
  float sum[4];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
    sum[i] = d[i];
    for (int k = 0; k < 16; ++k) {
      const int of_a = k / 8 * 4 + row / 8 * 2 + k % 2, of_b = k / 8 * 2 + k % 2;
      const model::Words &from_a = lanes[row % 8 * 4 + k % 8 / 2], &from_b = lanes[column * 4 + k % 8 / 2];
      sum[i] += bf16_value(model::half_of(from_a.at[of_a / 2], of_a % 2)) * bf16_value(model::half_of(from_b.at[4 + of_b / 2], of_b % 2));
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}

inline void warp_barrier() { model::exchanged(0, 0); }

}  // namespace numinous
