// SPDX-License-Identifier: Apache-2.0
// One wgmma, and a kernel that stays in registers only where it is given enough of them. Compiled, never run.
#ifndef LIVE
#define LIVE 8
#endif
#ifndef PRODUCTS
#define PRODUCTS 1
#endif

extern "C" __global__ void __launch_bounds__(128) multiply(float *out, unsigned long long a, unsigned long long b) {
  float c[4] = {};
  asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
  for (int i = 0; i < PRODUCTS; i++) {
    if (i > 0) c[0] *= 2.0f;  // while the product before is under way
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"(b));
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}

extern "C" __global__ void __launch_bounds__(1024) hold(float *x) {
  __shared__ float row[256];
  float live[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; i++) live[i] = x[i * 1024 + threadIdx.x];
  row[threadIdx.x & 255] = live[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < LIVE; i++) x[i * 1024 + threadIdx.x] = live[i] * row[i & 255] + live[LIVE - 1 - i];
}
