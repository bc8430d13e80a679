// SPDX-License-Identifier: Apache-2.0
//
// Instructions of sm_100a and sm_103a as functions: tcgen05 and tensor memory. Barriers, memory and numbers are sm_90a's.

#pragma once

#include "sm90.cuh"

namespace numinous {

// --- Tensor memory ------------------------------------------------------------------------------------------------------------

// Of one warp; the address goes to shared memory. Columns: a power of two from 32 on.
__device__ __forceinline__ void tensor_memory_take(uint32_t to, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void tensor_memory_give_back(uint32_t at, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(at), "r"(columns) : "memory");
}

// tcgen05 is ordered with barriers only by these: the first before an arrival, the second behind a wait.
__device__ __forceinline__ void fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// What ordinary stores wrote to shared memory, tcgen05.mma reads.
__device__ __forceinline__ void fence_for_mma() { fence_for_wgmma(); }

__device__ __forceinline__ void wait_for_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Registers that loads write may not be read before this.
template <int kCount>
__device__ __forceinline__ void wait_for_loads(float (&x)[kCount]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  hold(x);
}

// 16 lanes and twice as many columns as registers, in the order of WGMMA's accumulators: fragment_row, fragment_column.

__device__ __forceinline__ void load_fragment(float (&v)[4], uint32_t at) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at));
}
__device__ __forceinline__ void load_fragment(float (&v)[8], uint32_t at) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
               : "r"(at));
}
__device__ __forceinline__ void load_fragment(float (&v)[16], uint32_t at) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]),
        "=f"(v[8]), "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15])
      : "r"(at));
}

// 32 lanes, one a thread; register `i` is column `i`.

__device__ __forceinline__ void load_lanes(float (&v)[8], uint32_t at) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
               : "r"(at));
}
__device__ __forceinline__ void load_lanes(float (&v)[16], uint32_t at) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]),
        "=f"(v[8]), "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15])
      : "r"(at));
}

__device__ __forceinline__ void store_lanes(uint32_t at, const float (&v)[8]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(at),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7])
               : "memory");
}
__device__ __forceinline__ void store_lanes(uint32_t at, const float (&v)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16};" ::"r"(at),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]),
      "f"(v[8]), "f"(v[9]), "f"(v[10]), "f"(v[11]), "f"(v[12]), "f"(v[13]), "f"(v[14]), "f"(v[15])
      : "memory");
}

// --- Products, of one thread ----------------------------------------------------------------------------------------------------

// True in one lane of a whole warp, always the same. Not a comparison with threadIdx: of this the compiler knows that one thread is
// left, and keeps descriptors in uniform registers.
__device__ __forceinline__ bool elected() {
  uint32_t one;
  asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.b32 %0, 1, 0, p;}\n" : "=r"(one));
  return one != 0;
}

// Tensor memory at `d` (+)= a · b in bf16, both operands in shared memory; shape and order are in `instruction`.
__device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  asm volatile(
      "{.reg .pred p;\n"
      " setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;}\n" ::"r"(d), "l"(a), "l"(b), "r"(instruction), "r"(int(add))
      : "memory");
}

// One arrival at a barrier when all products of this thread so far are done; a fence before a barrier, too.
__device__ __forceinline__ void mma_commit(uint32_t barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace numinous
