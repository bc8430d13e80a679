// SPDX-License-Identifier: Apache-2.0
// One MFMA behind local memory. Compiled, never run. LIVE values have to be held at once.
#define kernel __attribute__((global))
#define bounds(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#ifndef LIVE
#define LIVE 4
#endif

typedef int int8v __attribute__((ext_vector_type(8)));
typedef float float4v __attribute__((ext_vector_type(4)));

extern "C" kernel bounds(256) void multiply(const int8v *a, const int8v *b, float4v *c) {
  __attribute__((shared)) static int8v tile[256];
  int thread = __builtin_amdgcn_workitem_id_x();
  tile[thread] = a[thread];
  __builtin_amdgcn_s_barrier();
  c[thread] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(tile[255 - thread], b[thread], c[thread], 0, 0, 0,
                                                               a[0][0], 0, b[0][0]);
}

extern "C" kernel bounds(1024) void hold(float *x) {
  int thread = __builtin_amdgcn_workitem_id_x();
  float live[LIVE];
#pragma unroll
  for (int i = 0; i < LIVE; i++) live[i] = x[i * 1024 + thread];
  __builtin_amdgcn_s_barrier();
#pragma unroll
  for (int i = 0; i < LIVE; i++) x[i * 1024 + thread] = live[i] * live[LIVE - 1 - i];
}
