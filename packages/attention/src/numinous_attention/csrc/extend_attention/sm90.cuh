// SPDX-License-Identifier: Apache-2.0
//
// Instructions of sm_90a as functions: WGMMA, mbarriers, copies, clusters, conversions.

#pragma once

#include <cstdint>

namespace numinous {

// --- WGMMA ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all groups but the last `kPending` are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that WGMMA works on may not move across this.
template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// d (+)= a · b of 64 × 64 × 16 in bf16, both operands K-major in shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred p;\n"
      " setp.ne.b32 p, %34, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(int(add)));
}

// d += a · b of 64 × 128 × 16 in bf16: a is a fragment in registers kFirst … kFirst + 3 of `a`, b MN-major in shared memory.
template <int kFirst>
__device__ __forceinline__ void wgmma_values(float (&d)[64], const uint32_t (&a)[16], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[kFirst]), "r"(a[kFirst + 1]), "r"(a[kFirst + 2]), "r"(a[kFirst + 3]), "l"(b));
}

// The same in all lanes of a warp, and known to be so: descriptors stay in uniform registers.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

// The same, which the compiler does not know: what follows from it is computed here and not kept.
__device__ __forceinline__ int anew(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// --- Barriers ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ uint8_t memory[];
  return memory;
}

__device__ __forceinline__ void fence_after_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_init(uint32_t at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
#ifdef NUMINOUS_DEBUG
// A wait that would never end is given up after about a second, so that the kernel ends and what it dumped can be read.
__device__ __forceinline__ void wait_for_there(uint32_t at, uint32_t parity) {
  const long long start = clock64();
  for (uint32_t done = 0; done == 0 && clock64() - start < 2000000000;)
    asm volatile(
        "{.reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;}\n" : "=r"(done) : "r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) { wait_for_there(at, parity); }
#else
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @!p bra again;}\n" ::"r"(at), "r"(parity) : "memory");
}
// What the other block sent is seen, too.
__device__ __forceinline__ void wait_for_there(uint32_t at, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      " @!p bra again;}\n" ::"r"(at), "r"(parity) : "memory");
}
#endif
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// What copies and ordinary stores wrote to shared memory, WGMMA reads.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- The other block of the cluster -----------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
// Of all threads of both blocks.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Address of what lies at `at` in block `rank`.
__device__ __forceinline__ uint32_t in_block(uint32_t at, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Stores there and says so to a barrier there, which counts bytes.
__device__ __forceinline__ void send(uint32_t at, uint4 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t at, float v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(__float_as_uint(v)),
               "r"(barrier)
               : "memory");
}
// Arrives here, and the phase ends when that many bytes have come.
__device__ __forceinline__ void barrier_expect(uint32_t at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// Without an order of memory: who arrives has its loads' values already.
__device__ __forceinline__ void arrive_there(uint32_t at) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
}

// --- Memory -----------------------------------------------------------------------------------------------------------------

// Copies 16 bytes to shared memory, zeros where `there` is false; then nothing is read.
__device__ __forceinline__ void copy_16(uint32_t to, const uint16_t* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Arrives when the thread's copies up to here are done.
__device__ __forceinline__ void arrive_after_copies(uint32_t at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ float load_shared(uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_4(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- Numbers ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float divide_fast(float a, float b) { return __fdividef(a, b); }

}  // namespace numinous
