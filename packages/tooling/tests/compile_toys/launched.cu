// SPDX-License-Identifier: Apache-2.0
// Kernels for the device tests of the launcher.

struct Pair {
  float factor;
  int n;
  double offset;
};

// y[n] = factor x[n]
extern "C" __global__ void __launch_bounds__(256) scale(const float *x, float *y, float factor, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    if (x) y[i] = factor * x[i];
    else y[i] = factor;
}

// y[n] = factor x[n] + offset
extern "C" __global__ void __launch_bounds__(256) scale_of(const float *x, float *y, const __grid_constant__ Pair pair) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pair.n) y[i] = pair.factor * x[i] + (float)pair.offset;
}

// y[n] = x[n - 1 - i], through n floats of dynamic shared memory; one block
extern "C" __global__ void __launch_bounds__(256) reverse(const float *x, float *y, int n) {
  extern __shared__ float row[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = row[n - 1 - i];
}

// x[i] += 1, and may start before the kernel ahead of it has ended
extern "C" __global__ void __launch_bounds__(256) increment(float *x, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.0f;
  asm volatile("griddepcontrol.launch_dependents;");
}

// y[block] = {x, y, z of the block in the grid, rank in its cluster}
extern "C" __global__ void __launch_bounds__(32) place(int4 *y) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x == 0) y[block] = make_int4(blockIdx.x, blockIdx.y, blockIdx.z, rank);
}
