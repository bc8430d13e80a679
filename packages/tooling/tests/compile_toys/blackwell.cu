// SPDX-License-Identifier: Apache-2.0
// Tensor memory and one tcgen05.mma with block scales. Compiled, never run. The spelling of the scale's block decides
// whether the family target takes it: ptxas refuses .scale_vec::4X there and takes .block16.
#ifdef CHIP
#define BLOCK ".scale_vec::4X"
#else
#define BLOCK ".block16"
#endif

extern "C" __global__ void __launch_bounds__(128) multiply(unsigned *out, unsigned long long a, unsigned idesc) {
  __shared__ unsigned at;
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 128;" ::"r"(
      (unsigned)__cvta_generic_to_shared(&at)));
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0;"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale" BLOCK " [%0], %1, %1, %2, [%0], [%0], p;}" ::"r"(at),
      "l"(a), "r"(idesc));
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 128;" ::"r"(at));
  out[threadIdx.x] = at;
}
