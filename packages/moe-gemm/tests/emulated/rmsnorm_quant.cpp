// SPDX-License-Identifier: Apache-2.0
//
// kernel.cu on the CPU: a fiber for each thread, a system thread for each block of a cluster, our own versions of what
// instructions.cuh has. It shows addresses, order of summation, barriers and the reuse of places. It does not show what the memory
// model of a GPU would; copies are made at once or as late as may be, and threads run in an order drawn from a seed, so that many
// races give wrong bits here too. Approximate instructions are exact ones.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define NUMINOUS_RMSNORM_QUANT_INSTRUCTIONS
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ constinit thread_local
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct __nv_bfloat16 { uint16_t bits; };
struct Index { unsigned x; };

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kSharedLimit = 232448, kMaxThreads = 1024, kStack = 64 << 10, kPatience = 1 << 20;

// --- Fibers ---------------------------------------------------------------------------------------------------------

struct Meeting {  // of `count` threads, again and again
  int arrived = 0, round = 0;
};

struct Warp {
  Meeting meeting;
  uint32_t slots[32];
};

struct Cluster {
  std::mutex lock;
  int arrived = 0, round = 0, threads = 0;
};

enum class Copies { kAtOnce, kLate, kNotAwaited };  // the last is a planted fault: nobody waits for bulk copies

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct Arrivals {
  int phase = 0;
  bool expected = false;
  int64_t missing = 0;
  std::vector<Copy> late;
};

struct Block {
  ucontext_t main;
  std::vector<ucontext_t> fibers;
  std::vector<char> ended;
  Warp warps[kMaxThreads / 32];
  std::map<int, Meeting> named;  // -1: of all
  std::map<uint64_t*, Arrivals> arrivals;
  std::map<int, std::vector<Copy>> own;  // of cp.async, by thread
  Cluster* cluster;
  int cluster_round[kMaxThreads];
  unsigned threads, thread;
  Copies copies;
  int64_t progress = 0;
};

thread_local Block* block;
thread_local Index threadIdx, blockIdx, blockDim, gridDim;
constinit thread_local float4 weights[kSharedLimit / 16], row_values[kSharedLimit / 16];

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "emulated: %s, block %u thread %u\n", why, blockIdx.x, threadIdx.x);
  std::_Exit(3);
}

void yield() {
  const unsigned mine = threadIdx.x;
  swapcontext(&block->fibers[mine], &block->main);
  threadIdx.x = mine;
}

void meet(Meeting& meeting, int count) {
  const int round = meeting.round;
  ++block->progress;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  while (meeting.round == round) yield();
}

uint32_t exchange(uint32_t value, int offset) {
  Warp& warp = block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  warp.slots[lane] = value;
  meet(warp.meeting, 32);
  const uint32_t got = warp.slots[lane ^ offset];
  meet(warp.meeting, 32);
  return got;
}

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// --- CUDA -----------------------------------------------------------------------------------------------------------

float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }
float __fadd_rn(float a, float b) { return a + b; }
float __fmul_rn(float a, float b) { return a * b; }
float __fdiv_rn(float a, float b) { return a / b; }
float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
float fmaxf(float a, float b) { return std::fmax(a, b); }
float fminf(float a, float b) { return std::fmin(a, b); }
float __shfl_xor_sync(unsigned, float value, int offset) { return bits_as<float>(exchange(bits_as<uint32_t>(value), offset)); }
uint32_t __shfl_xor_sync(unsigned, uint32_t value, int offset) { return exchange(value, offset); }

bool __any_sync(unsigned, bool value) {
  uint32_t any = value;
  for (int offset = 1; offset < 32; offset *= 2) any |= exchange(any, offset);
  return any;
}

void __syncthreads() { meet(block->named[-1], block->threads); }

uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (both >> (8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
  return out;
}

// --- instructions.cuh -----------------------------------------------------------------------------------------------

float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
float of_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

uint32_t to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t bf16_pair(float first, float second) { return to_bf16(first) | to_bf16(second) << 16; }

uint32_t to_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const uint32_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::min(std::fabs(value), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint32_t>(std::nearbyint(size * 512.0f));
  int exponent;
  const float mantissa = std::frexp(size, &exponent);  // 0.5 … 1
  const int rounded = static_cast<int>(std::nearbyint(mantissa * 16.0f));  // 8 … 16
  return sign | static_cast<uint32_t>((exponent - 1 + 7) * 8 + rounded - 8);
}

uint32_t e4m3_four(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}

template <bool kNan>
uint32_t max_half(uint32_t a, uint32_t b) {
  const float x = of_bf16(a), y = of_bf16(b);
  if (std::isnan(x) || std::isnan(y)) {
    if (kNan || (std::isnan(x) && std::isnan(y))) return 0x7fff;
    return std::isnan(x) ? b : a;
  }
  return x > y ? a : b;
}

template <bool kNan>
uint32_t max_pair(uint32_t a, uint32_t b) {
  return max_half<kNan>(a & 0xffff, b & 0xffff) | max_half<kNan>(a >> 16, b >> 16) << 16;
}

template <bool kNan>
uint32_t max_magnitude_pair(uint32_t a, uint32_t b) {
  return max_pair<kNan>(a & 0x7fff7fffu, b & 0x7fff7fffu) | ((a ^ b) & 0x80008000u);
}

template <bool kClamp>
uint32_t scaled_pair(uint32_t pair, uint32_t factor, uint32_t most) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i += 16) {
    uint32_t half = to_bf16(of_bf16(pair >> i & 0xffff) * of_bf16(factor >> i & 0xffff));
    if (kClamp) half = to_bf16(std::fmin(of_bf16(half), of_bf16(most >> i & 0xffff)));
    out |= half << i;
  }
  return out;
}

float mul_ftz(float a, float b) { return flushed(flushed(a) * flushed(b)); }
float div_approx_ftz(float a, float b) { return std::fabs(b) > 0x1p126f ? 0.0f : flushed(flushed(a) / flushed(b)); }
float div_full(float a, float b) { return a / b; }
float rsqrt_approx_ftz(float a) { return 1.0f / std::sqrt(a); }

uint4 load_streaming(const void* p) { return *static_cast<const uint4*>(p); }
uint4 load_constant(const void* p) { return *static_cast<const uint4*>(p); }
void wait_for_kernel_ahead(const void* = nullptr) {}
void let_next_start() {}

void copy_async(uint4* to, const void* from, bool inside) {
  if (!inside) {
    *to = uint4{};
  } else if (block->copies != Copies::kAtOnce) {
    block->own[threadIdx.x].push_back({to, from, 16});
  } else {
    std::memcpy(to, from, 16);
  }
}

void copy_async_commit() {}

void copy_async_wait() {
  for (const Copy& copy : block->own[threadIdx.x]) std::memcpy(copy.to, copy.from, copy.bytes);
  block->own[threadIdx.x].clear();
}

void arrivals_start(uint64_t* barrier) { block->arrivals[barrier] = {}; }

void arrivals_done(Arrivals& of) {
  if (!of.expected || of.missing) return;
  ++of.phase;
  of.expected = false;
}

void arrivals_expect(uint64_t* barrier, uint32_t bytes) {
  Arrivals& of = block->arrivals.at(barrier);
  if (of.expected) fail("bytes are expected in a phase that has not ended");
  of.expected = true;
  of.missing += bytes;
  arrivals_done(of);
}

void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bits_as<uintptr_t>(to) % 16 || bits_as<uintptr_t>(from) % 16 || bytes % 16) fail("a bulk copy is not aligned");
  Arrivals& of = block->arrivals.at(barrier);
  if (block->copies != Copies::kAtOnce) {
    of.late.push_back({to, from, bytes});
    return;
  }
  std::memcpy(to, from, bytes);
  of.missing -= bytes;
  arrivals_done(of);
}

void say(int* where, int value) { *where = value; }
void wait_until_said(const int* where, int value) {
  while (*where != value) yield();
}

void arrivals_wait(uint64_t* barrier, uint32_t phase) {
  while (block->copies != Copies::kNotAwaited) {
    Arrivals& of = block->arrivals.at(barrier);
    for (const Copy& copy : of.late) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      of.missing -= copy.bytes;
    }
    if (!of.late.empty()) of.late.clear(), arrivals_done(of);
    if ((of.phase & 1u) != phase) return;
    yield();
  }
}

template <int kThreads>
void sync_group(int group) {
  if (group < 0 || group > 15) fail("there are 16 named barriers");
  meet(block->named[group], kThreads);
}

void cluster_arrive() {
  Cluster& all = *block->cluster;
  std::lock_guard<std::mutex> hold(all.lock);
  ++block->progress;
  block->cluster_round[threadIdx.x] = all.round;
  if (++all.arrived == all.threads) all.arrived = 0, ++all.round;
}

void cluster_wait() {
  for (;;) {
    {
      std::lock_guard<std::mutex> hold(block->cluster->lock);
      if (block->cluster->round != block->cluster_round[threadIdx.x]) break;
    }
    yield();
  }
  ++block->progress;
}

}  // namespace

#include "kernel.cu"

// --- Launch ---------------------------------------------------------------------------------------------------------

namespace {

using Kernel = void (*)(const Params);

struct Start {
  Kernel kernel;
  const Params* params;
};

void enter(unsigned high, unsigned low) {
  const auto* start = bits_as<const Start*>(static_cast<uint64_t>(high) << 32 | low);
  start->kernel(*start->params);
  block->ended[threadIdx.x] = 1;
  ++block->progress;
  swapcontext(&block->fibers[threadIdx.x], &block->main);
}

void run_block(const Start& start, unsigned index, unsigned grid, unsigned threads, int shared, Cluster* cluster, char* stacks,
               unsigned seed, Copies copies) {
  auto here = std::make_unique<Block>();
  block = here.get();
  block->fibers.resize(threads);
  block->ended.resize(threads);
  block->threads = threads, block->cluster = cluster, block->copies = copies;
  blockIdx.x = index, gridDim.x = grid, blockDim.x = threads;
  std::memset(weights, 0xff, sizeof(weights));  // NaN
  std::memset(row_values, 0xff, sizeof(row_values));
  const auto address = bits_as<uint64_t>(&start);
  std::vector<unsigned> order(threads);
  for (unsigned t = 0; t < threads; ++t) {
    order[t] = t;
    getcontext(&block->fibers[t]);
    block->fibers[t].uc_stack.ss_sp = stacks + static_cast<size_t>(t) * kStack;
    block->fibers[t].uc_stack.ss_size = kStack;
    block->fibers[t].uc_link = nullptr;
    makecontext(&block->fibers[t], reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address >> 32),
                static_cast<unsigned>(address));
  }
  std::mt19937 random(seed + index);
  int idle = 0;
  uint32_t stopped = 0;  // warps that do not move until `until`, or until no other can
  for (size_t left = threads, pass = 0, until = 0; left; ++pass) {
    std::shuffle(order.begin(), order.end(), random);
    if (pass >= until) stopped = random() & random(), until = pass + (size_t{16} << random() % 10);
    const int64_t before = block->progress;
    left = 0;
    for (unsigned t : order) {
      if (block->ended[t]) continue;
      ++left;
      if (stopped >> t / 32 & 1) continue;
      threadIdx.x = t;
      swapcontext(&block->main, &block->fibers[t]);
    }
    if (block->progress == before && stopped) {
      stopped = 0, until = pass + 2;
      continue;
    }
    idle = block->progress == before ? idle + 1 : 0;
    if (idle > 1000 && cluster->threads > static_cast<int>(threads)) std::this_thread::yield();
    if (idle > (cluster->threads > static_cast<int>(threads) ? kPatience : 1000)) fail("all threads wait");
  }
  for (const void* memory : {static_cast<void*>(weights), static_cast<void*>(row_values)}) {
    const auto* bytes = static_cast<const unsigned char*>(memory);
    for (int i = shared; i < kSharedLimit; ++i)
      if (bytes[i] != 0xff) fail("shared memory behind the end was written");
  }
}

}  // namespace

// Runs a grid, cluster by cluster. The process ends with code 3 where a kernel breaks a rule.
extern "C" void emulate(void* kernel, const void* params, unsigned grid, unsigned threads, int shared, unsigned cluster,
                        unsigned seed, int copies) {
  const Start start{reinterpret_cast<Kernel>(kernel), static_cast<const Params*>(params)};
  const size_t of_block = static_cast<size_t>(threads) * kStack;
  std::vector<char> stacks(of_block * cluster);
  for (unsigned first = 0; first < grid; first += cluster) {
    Cluster meeting;
    meeting.threads = static_cast<int>(cluster * threads);
    std::vector<std::thread> blocks;
    for (unsigned i = 0; i < cluster; ++i)
      blocks.emplace_back(run_block, std::cref(start), first + i, grid, threads, shared, &meeting, stacks.data() + i * of_block,
                          seed, static_cast<Copies>(copies));
    for (std::thread& each : blocks) each.join();
  }
}
