// SPDX-License-Identifier: Apache-2.0
//
// The machine instructions that kernel.cu is written in. The tests run the kernels on the CPU with their own versions of these.

#ifndef NUMINOUS_RMSNORM_QUANT_INSTRUCTIONS
#define NUMINOUS_RMSNORM_QUANT_INSTRUCTIONS

#include <cuda_bf16.h>

#include <cstdint>

namespace {

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint4 load_streaming(const void* p) {  // read once: leave L1 to others
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool inside) {  // else zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Programmatic dependent launch: wait until the kernel ahead has ended and its memory is there; let the next one start.
__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same, after `address` has been computed: ptxas moves what it may behind the wait, and its time would be added.
__device__ __forceinline__ void wait_for_kernel_ahead(const void* address) {
  asm volatile("{.reg .pred p;\n setp.ne.u64 p, %0, 0;\n @p griddepcontrol.wait;}" :: "l"(address) : "memory");
}

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ uint32_t bf16_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ uint32_t e4m3_four(float a, float b, float c, float d) {
  uint32_t four;
  asm("{.reg .b16 lo, hi;\n"
      " cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      " mov.b32 %0, {lo, hi};}"
      : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

template <bool kNan>  // whether NaN wins, or the number beside it
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t m;
  if constexpr (kNan) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

// Both halves times a power of two, which is exact, and with `kClamp` at most `most`: NaN becomes `most` too.
template <bool kClamp>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, uint32_t factor, uint32_t most) {
  const auto of = [](const uint32_t& bits) { return reinterpret_cast<const __nv_bfloat162&>(bits); };
  __nv_bfloat162 scaled = __hmul2(of(pair), of(factor));
  if constexpr (kClamp) scaled = __hmin2(scaled, of(most));
  return reinterpret_cast<const uint32_t&>(scaled);
}

// The same of magnitudes: bits of the sign are to be cleared by the caller.
template <bool kNan>
__device__ __forceinline__ uint32_t max_magnitude_pair(uint32_t a, uint32_t b) {
  uint32_t m;
  if constexpr (kNan) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

// The engine's quantisation is built with --use_fast_math: these are the instructions that it means there.
__device__ __forceinline__ float mul_ftz(float a, float b) {
  float c;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float div_approx_ftz(float a, float b) {
  float c;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float div_full(float a, float b) {
  float c;
  asm("div.full.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// The norm is built without it, but for this one.
__device__ __forceinline__ float rsqrt_approx_ftz(float a) {
  float c;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(c) : "f"(a));
  return c;
}

// --- Bulk copies, named barriers, clusters: for hopper.cuh ------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barrier in shared memory on which bytes arrive, one phase after the other.
__device__ __forceinline__ void arrivals_start(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // seen by copies
}

__device__ __forceinline__ void arrivals_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrivals_wait(uint64_t* barrier, uint32_t phase) {  // 0 or 1 in turn
  uint32_t done;
  do {
    asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  } while (!done);
}

// A number in shared memory, from one thread to the others of a block.
__device__ __forceinline__ void say(int* where, int value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(shared_address(where)), "r"(value) : "memory");
}

__device__ __forceinline__ void wait_until_said(const int* where, int value) {
  int said;
  do {
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(said) : "r"(shared_address(where)) : "memory");
  } while (said != value);
}

__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void sync_group(int group) {  // of 32 threads: a warp
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" :: "r"(group), "n"(kThreads) : "memory");
  }
}

// Of all threads of the cluster, without an order of memory: who arrives has its loads' values already.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

}  // namespace

#endif
