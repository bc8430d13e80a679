// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of a warp: `ldmatrix` and `mma.sync`, in the instruction set since sm_80, so that what is made for sm_120a also runs
// on sm_90a. Barriers, loads and conversions are those of `sm90.cuh`, which sm_120a has, too; of WGMMA nothing is used.

#pragma once

#include "sm90.cuh"

namespace numinous {

// Four matrices of 8 × 8 bf16: lanes 8 i … 8 i + 7 name the rows of matrix i. A lane gets of each values 2 (lane % 4) and the next of
// row lane / 4; transposed, of column lane / 4.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&v)[4], uint32_t row_at) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(row_at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(row_at) : "memory");
}

// d += a · b of 16 × 8 × 16 in bf16. d: row lane / 4 (registers 2 and 3: 8 further), columns 2 (lane % 4) and the next.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// All lanes of a warp have read what one of them gives back.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

}  // namespace numinous
