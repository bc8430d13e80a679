// SPDX-License-Identifier: Apache-2.0
// A CUDA driver for tests: it checks nothing that the real one would compute, and writes down what it was asked.
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 20];
static size_t used;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
// ctypes lets other threads run during a call: each writes its line by itself, and adds it when it is whole.
static _Thread_local char line[4096];
static _Thread_local size_t length;
static int quiet;
static _Thread_local int has_context;
static int major = 9, minor, fail_launch, initialised;
static CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static const size_t sizes[] = {8, 8, 4, 16};

static void end_line(void) {
  pthread_mutex_lock(&writing);
  if (used + length >= sizeof text) abort();
  memcpy(text + used, line, length + 1);
  used += length;
  pthread_mutex_unlock(&writing);
  length = 0;
}

#define NOTE(...) \
  do { \
    if (quiet) break; \
    length += snprintf(line + length, sizeof line - length, __VA_ARGS__); \
    if (length >= sizeof line) abort(); \
    if (line[length - 1] == '\n') end_line(); \
  } while (0)

const char *fake_text(void) { return text; }
void fake_reset(int new_major, int new_minor, int new_fail_launch, int new_quiet) {
  used = 0, text[0] = 0;
  major = new_major, minor = new_minor, fail_launch = new_fail_launch, quiet = new_quiet;
}

CUresult cuInit(unsigned flags) {
  NOTE("cuInit %u\n", flags);
  initialised = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? major
           : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? minor
                                                                  : -1;
  return *value < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  NOTE("retain %d\n", device);
  *context = (CUcontext)0x11;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  has_context = context == (CUcontext)0x11;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return has_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CUstreamCaptureMode old = capture_mode;
  capture_mode = *mode, *mode = old;
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *a, void **b, unsigned c,
                           CUlibraryOption *d, void **e, unsigned f) {
  NOTE("load %s relaxed=%d\n", (const char *)code, capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  *library = (CUlibrary)0x22;
  return a || b || c || d || e || f ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  *kernel = (CUkernel)0x33;
  if (library != (CUlibrary)0x22) return CUDA_ERROR_INVALID_HANDLE;
  return strcmp(name, "scale") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  *function = (CUfunction)0x44;
  return has_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuFuncLoad(CUfunction function) {
  NOTE("function relaxed=%d\n", capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  return function == (CUfunction)0x44 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
  if (index >= sizeof sizes / sizeof *sizes) return CUDA_ERROR_INVALID_VALUE;
  *size = sizes[index];
  return kernel == (CUkernel)0x33 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block, size_t shared) {
  NOTE("occupancy %d %zu\n", block, shared);
  *blocks = 2048 / block;
  return function == (CUfunction)0x44 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *c) {
  unsigned cluster = 0;
  for (unsigned i = 0; i < c->numAttrs; i++) {
    if (c->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return CUDA_ERROR_INVALID_VALUE;
    cluster = c->attrs[i].value.clusterDim.x;
  }
  NOTE("clusters of %u, %u %u shared %u\n", cluster, c->gridDimX, c->blockDimX, c->sharedMemBytes);
  if (cluster > 16) return (CUresult)912;
  *clusters = cluster ? 132 / cluster : -1;
  return function == (CUfunction)0x44 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute what, CUkernel kernel, CUdevice device) {
  *value = 1024;
  return what == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuKernelSetAttribute(CUfunction_attribute what, int value, CUkernel kernel, CUdevice device) {
  NOTE("attribute %d=%d device %d\n", what, value, device);
  return value + 1024 <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction kernel, void **args, void **extra) {
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (fail_launch) return (CUresult)fail_launch;
  if (kernel != (CUfunction)0x33 || extra) return CUDA_ERROR_INVALID_HANDLE;
  NOTE("launch %u,%u,%u %u,%u,%u shared %u stream %p", c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
       c->blockDimY, c->blockDimZ, c->sharedMemBytes, (void *)c->hStream);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttribute *a = c->attrs + i;
    if (a->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      NOTE(" pdl %d", a->value.programmaticStreamSerializationAllowed);
    else if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      NOTE(" cluster %u,%u,%u", a->value.clusterDim.x, a->value.clusterDim.y, a->value.clusterDim.z);
    else if (a->id != CU_LAUNCH_ATTRIBUTE_IGNORE)
      return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    NOTE(" ");
    for (size_t byte = sizes[i]; byte--;) NOTE("%02x", ((unsigned char *)args[i])[byte]);
  }
  NOTE("\n");
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char **name) {
  *name = code == CUDA_ERROR_INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
          : code == CUDA_ERROR_NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
          : code == CUDA_ERROR_NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
                                               : 0;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult code, const char **words) {
  *words = "as the driver says it";
  return CUDA_SUCCESS;
}
