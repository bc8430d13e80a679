// SPDX-License-Identifier: Apache-2.0
//
// A model of one block of sm_90a, or of a cluster of blocks, on the CPU, in place of csrc/sparse_mla_decode/sm90.cuh: the kernel's source itself runs, one fiber a
// thread, until each waits for another. What is modelled is what the PTX manual says, written anew: WGMMA's operands read through
// their descriptors (128-byte swizzle, K-major and MN-major), accumulator fragments, mbarriers with phases, named barriers, shuffles.
// Products are done when their group is waited for, after all others have run, or, eager, at once: what they read must stand still in between.
// Operands in registers have to stay as they are until then. Copies of rows are done when the thread waits for their group, or, eager, at once.
// What is not modelled: proxies, register handover, time. Shared memory starts as NaN. Rows that are asked for in L2 are only counted: one
// that is not read afterwards is a fault.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x, y, z; };

using std::fabs;
using std::max;
using std::min;

namespace model {

struct Exchange { uint32_t value[32] = {}; int arrived = 0; unsigned generation = 0; };
struct Named { int arrived = 0; unsigned generation = 0; };
struct MBarrier { int count = 0, pending = 0; unsigned phase = 0; };

struct Block {
  std::vector<ucontext_t> contexts;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<bool> done;
  ucontext_t scheduler;
  unsigned current = 0, threads = 0, ended = 0;
  unsigned blocks = 1;  // of a cluster, all of whose threads are here, one block's behind the other's
  std::vector<uint8_t> memory;
  std::map<uint32_t, MBarrier> barriers;
  std::map<int, Named> named;
  std::map<int, bool> any[2];  // what a named barrier is asked, of its generations by turns
  std::vector<Exchange> warps;
  std::vector<std::vector<std::vector<std::function<void()>>>> products;  // of each thread, groups under way; the last is not committed
  std::vector<std::vector<std::vector<std::function<void()>>>> row_copies;  // likewise
  std::vector<uint32_t> fragments[2];  // of each thread's last two products with registers: four a thread
  std::vector<unsigned> fragment_turn;  // of each thread
  std::set<const uint8_t*> asked;  // rows that should be on their way to L2
  long idle = 0, turn = 0;
  bool moved = false;
  const char* fault = nullptr;
};
inline Block block;
inline Index block_index{};
inline long rows_asked = 0;  // of all blocks
inline const uint8_t *first_asked = nullptr, *last_asked = nullptr;  // of what is no row, the last time
inline bool eager = false;  // products are done as early as they may be
inline int slow = -1;  // a warpgroup that has one turn of four
inline long patience() { return slow < 0 ? 2 : 8; }  // turns of all threads without any progress

inline unsigned rank() { return block.current / (block.threads / block.blocks); }  // of the thread's block

inline void yield() { swapcontext(&block.contexts[block.current], &block.scheduler); }
inline void fail(const char* why) {
  if (block.fault == nullptr) block.fault = why;
  while (true) yield();
}
inline void progress() {
  block.idle = 0;
  block.moved = true;
}

inline uint8_t* at(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) fail("misaligned shared memory access");
  const size_t size = block.memory.size() / block.blocks;
  if (address + bytes > size) fail("shared memory access out of bounds");
  return block.memory.data() + rank() * size + address;
}

inline uint32_t exchanged(uint32_t value, int from_lane) {
  Exchange& warp = block.warps[block.current / 32];
  const unsigned generation = warp.generation;
  static std::vector<uint32_t> kept;  // values of the exchange that is being read
  if (kept.size() < block.threads) kept.resize(block.threads);
  warp.value[block.current % 32] = value;
  if (++warp.arrived == 32) {
    std::copy(warp.value, warp.value + 32, kept.begin() + block.current / 32 * 32);
    warp.arrived = 0;
    ++warp.generation;
    progress();
  }
  while (warp.generation == generation) yield();
  // The next exchange cannot complete before this thread arrives at it.
  return kept[block.current / 32 * 32 + from_lane];
}

}  // namespace model

struct ThreadIndex {
  struct { operator unsigned() const { return model::block.current % (model::block.threads / model::block.blocks); } } x;
};
inline ThreadIndex threadIdx;
struct BlockIndex {  // of a cluster's first block, along x
  struct { operator unsigned() const { return model::block_index.x + model::rank(); } } x;
  struct { operator unsigned() const { return model::block_index.y; } } y;
};
inline BlockIndex blockIdx;

inline float __uint_as_float(uint32_t bits) { float v; std::memcpy(&v, &bits, 4); return v; }
inline uint32_t float_as_uint(float v) { uint32_t bits; std::memcpy(&bits, &v, 4); return bits; }
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  return __uint_as_float(model::exchanged(float_as_uint(value), (model::block.current % 32) ^ lanes));
}
inline float __shfl_sync(unsigned, float value, int lane) { return __uint_as_float(model::exchanged(float_as_uint(value), lane % 32)); }
inline int __any_sync(unsigned, bool value) {
  uint32_t any = value;
  for (int lanes = 1; lanes < 32; lanes *= 2) any |= model::exchanged(any, (model::block.current % 32) ^ lanes);
  return any != 0;
}
inline uint32_t __shfl_sync(unsigned, uint32_t value, int lane) { return model::exchanged(value, lane); }
inline uint32_t __ballot_sync(unsigned, bool value) {
  uint32_t all = uint32_t(value) << model::block.current % 32;
  for (int lanes = 1; lanes < 32; lanes *= 2) all |= model::exchanged(all, (model::block.current % 32) ^ lanes);
  return all;
}
inline void __syncwarp() { model::exchanged(0, 0); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t v = 0;
  for (int i = 0; i < 4; ++i) v |= uint32_t(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return v;
}

namespace numinous {

inline void named_barrier(int id, int threads) {
  model::Named& barrier = model::block.named[id + 16 * int(model::rank())];
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    model::progress();
  }
  while (barrier.generation == generation) model::yield();
}
inline bool named_barrier_any(int id, int threads, bool mine) {
  const int key = id + 16 * int(model::rank());
  const unsigned generation = model::block.named[key].generation;
  model::block.any[(generation + 1) % 2][key] = false;
  bool& all = model::block.any[generation % 2][key];
  all = all || mine;
  named_barrier(id, threads);
  return all;
}
}  // namespace numinous
inline void __syncthreads() { numinous::named_barrier(0, int(model::block.threads / model::block.blocks)); }

namespace numinous {

inline uint8_t* dynamic_shared() { return model::at(0, 1) + 256; }  // not at a multiple of 1024
inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const uint8_t*>(p) - model::at(0, 1)); }
inline void wait_for_grid_before() {}
inline void fence_after_init() {}
inline void start_next_grid() {}
inline void fence_for_wgmma() {}
inline void wgmma_fence() {}
inline void wgmma_commit() { model::block.products[model::block.current].emplace_back(); }
template <int kLeft = 0> void wgmma_wait() {  // by a warp together: what one lane says afterwards, it says for all
  for (const long turn = model::block.turn; model::block.turn == turn && !model::eager;) model::yield();
  auto& groups = model::block.products[model::block.current];
  while (groups.size() > kLeft + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  model::exchanged(0, 0);
}
template <int kCount> void hold(float (&)[kCount]) {}
template <int> void more_registers() {}
template <int> void fewer_registers() {}

inline int uniform(int v, int lane = 0) { return int(model::exchanged(uint32_t(v), lane)); }

inline void barrier_init(uint32_t at, int count) { model::block.barriers[model::rank() << 24 | at] = {count, count, 0}; }
inline void barrier_arrive(uint32_t at) {
  model::MBarrier& barrier = model::block.barriers.at(model::rank() << 24 | at);
  if (--barrier.pending == 0) {
    barrier.pending = barrier.count;
    ++barrier.phase;
    model::progress();
  }
}
// Until the phase of that parity is over; before the first, the one of parity 1 is.
inline void barrier_wait(uint32_t at, uint32_t parity) {
  model::MBarrier& barrier = model::block.barriers.at(model::rank() << 24 | at);
  while (barrier.phase % 2 == parity) model::yield();
}

inline int cluster_rank() { return int(model::rank()); }
// Threads that have ended are not waited for.
inline void cluster_barrier() {
  model::Named& barrier = model::block.named[-1];
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  while (barrier.generation == generation) {
    if (barrier.arrived + int(model::block.ended) < int(model::block.threads)) {
      model::yield();
      continue;
    }
    barrier.arrived = 0;
    ++barrier.generation;
    model::progress();
  }
}
inline void cluster_leave() { cluster_barrier(); }
inline const float* in_block(const float* p, int rank) {
  if (rank < 0 || rank >= int(model::block.blocks)) model::fail("no such block of the cluster");
  const unsigned threads = model::block.threads / model::block.blocks;
  bool alive = false;
  for (unsigned i = 0; i < threads && !alive; ++i) alive = !model::block.done[threads * rank + i];
  if (!alive) model::fail("memory of a block that has ended");
  const auto size = std::ptrdiff_t(model::block.memory.size() / model::block.blocks);
  return p + (rank - int(model::rank())) * size / std::ptrdiff_t(sizeof(float));
}

inline float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
inline uint32_t bf16_bits(float v) {
  const uint32_t bits = float_as_uint(v);
  if (v != v) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  return bf16_pair(bf16_value(uint16_t(a)) * bf16_value(uint16_t(b)), bf16_value(uint16_t(a >> 16)) * bf16_value(uint16_t(b >> 16)));
}
inline uint32_t permute_bytes(uint32_t word, uint32_t selector) {
  uint32_t v = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15, byte = word >> (8 * (nibble & 3)) & 0xff;
    v |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
  }
  return v;
}
inline float e4m3_value(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float v = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
  if ((code & 0x7f) == 0x7f) v = NAN;
  return code & 0x80 ? -v : v;
}
inline float2 e4m3_values(uint32_t codes) { return {e4m3_value(codes & 0xff), e4m3_value(codes >> 8 & 0xff)}; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

inline uint4 load_row(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) model::fail("misaligned load of a row");
  model::block.asked.erase(p);
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void ask_together(const uint8_t* p, uint32_t bytes) {
  const uint32_t low = uint32_t(reinterpret_cast<uintptr_t>(p));
  if (low % 16 != 0 || bytes % 16 != 0 || bytes == 0) model::fail("what is asked for is not in units of 16 bytes");
  if (model::exchanged(low, 0) != low) model::fail("lanes have asked for different bytes");
}
inline void prefetch_bytes(const uint8_t* p, uint32_t bytes) {
  model::first_asked = p;
  model::last_asked = p + bytes;
  ask_together(p, bytes);
}
template <int kBytes> void prefetch_row(const uint8_t* p) {
  if (model::block.current % 32 == 0) {
    model::block.asked.insert(p);
    ++model::rows_asked;
  }
  ask_together(p, kBytes);
}
inline void copy_of_row(uint32_t to, const uint8_t* from, bool there) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) model::fail("misaligned load of a row");
  uint8_t* at = model::at(to, 16);
  const auto copy = [=] {
    if (there) {
      std::memcpy(at, from, 16);
    } else {
      std::memset(at, 0, 16);
    }
  };
  if (model::eager) return copy();
  model::block.row_copies[model::block.current].back().push_back(copy);
}
inline void commit_copies() { model::block.row_copies[model::block.current].emplace_back(); }
template <int kLeft> void await_copies() {
  auto& groups = model::block.row_copies[model::block.current];
  while (groups.size() > kLeft + 1) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}
template <class T> T from_shared(uint32_t from) {
  T v;
  std::memcpy(&v, model::at(from, sizeof v), sizeof v);
  return v;
}
inline uint32_t word_at(uint32_t at) { return from_shared<uint32_t>(at); }
inline uint2 words_at(uint32_t at) { return from_shared<uint2>(at); }
inline const uint8_t* settled(const uint8_t* p) { return p; }
inline int again(int v) { return v; }
template <class T> void store_shared(uint32_t to, T v) { std::memcpy(model::at(to, sizeof v), &v, sizeof v); }

// Element (outer, inner) of an operand of 16 inner values. PTX ISA, matrix descriptor and canonical layouts of 128-byte swizzle:
// K-major ((8, n), 16) with strides ((128 bytes, SBO), element), MN-major ((64, n), (8, 2)) with ((element, LBO), (128 bytes, SBO));
// address bits 4 … 6 are then xored with bits 7 … 9.
inline float operand(uint64_t descriptor, bool mn_major, int outer, int inner) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) model::fail("not a descriptor of 128-byte swizzle");
  const uint32_t start = uint32_t(descriptor & 0x3fff) * 16, leading = uint32_t(descriptor >> 16 & 0x3fff) * 16,
                 stride = uint32_t(descriptor >> 32 & 0x3fff) * 16;
  const uint32_t plain = mn_major ? start + outer % 64 * 2 + outer / 64 * leading + inner % 8 * 128 + inner / 8 * stride
                                  : start + outer % 8 * 128 + outer / 8 * stride + inner * 2;
  uint16_t bits;
  std::memcpy(&bits, model::at(plain ^ (plain >> 7 & 7) << 4, 2), 2);
  return bf16_value(bits);
}

template <bool kMnMajorA, bool kMnMajorB, int kRegisters>
void multiply_add(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  const int thread = int(model::block.current % 128), warp = thread / 32, lane = thread % 32;
  float rows[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k) rows[r][k] = operand(a, kMnMajorA, 16 * warp + lane / 4 + 8 * r, k);
  for (int i = 0; i < kRegisters; i += 4)
    for (int c = 0; c < 2; ++c) {
      float first = add ? d[i + c] : 0.0f, second = add ? d[i + 2 + c] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const float value = operand(b, kMnMajorB, 2 * i + 2 * (lane % 4) + c, k);
        first += rows[0][k] * value;
        second += rows[1][k] * value;
      }
      d[i + c] = first;
      d[i + 2 + c] = second;
    }
}

template <bool kMnMajorA, bool kMnMajorB, int kRegisters>
void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  if (model::eager) return multiply_add<kMnMajorA, kMnMajorB>(d, a, b, add);
  model::block.products[model::block.current].back().push_back([&d, a, b, add] { multiply_add<kMnMajorA, kMnMajorB>(d, a, b, add); });
}

// A fragment of 64 × 16: registers 0 and 2 have row lane / 4, inner values 2 · (lane % 4) and 8 further; 1 and 3 the row 8 below.
template <int kRegisters> void wgmma_registers(float (&d)[kRegisters], const uint32_t* a, uint64_t b, bool add) {
  const unsigned current = model::block.current, turn = model::block.fragment_turn[current]++ % 2;
  auto& fragments = model::block.fragments[turn];
  std::copy(a, a + 4, fragments.begin() + 4 * current);
  model::exchanged(0, 0);  // a lane that is ahead writes those of the other turn
  std::vector<float> rows(32);
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = fragments[4 * (current / 4 * 4 + lane) + i];
      for (int half = 0; half < 2; ++half) rows[i % 2 * 16 + i / 2 * 8 + 2 * lane + half] = bf16_value(uint16_t(pair >> 16 * half));
    }
  const std::vector<uint32_t> issued(a, a + 4);
  const auto product = [&d, a, b, add, rows, issued] {
    if (!std::equal(issued.begin(), issued.end(), a)) model::fail("an operand in registers changes under way");
    const int lane = int(model::block.current % 32);
    for (int i = 0; i < kRegisters; i += 4)
      for (int c = 0; c < 2; ++c) {
        float first = add ? d[i + c] : 0.0f, second = add ? d[i + 2 + c] : 0.0f;
        for (int k = 0; k < 16; ++k) {
          const float value = operand(b, false, 2 * i + 2 * (lane % 4) + c, k);
          first += rows[k] * value;
          second += rows[16 + k] * value;
        }
        d[i + c] = first;
        d[i + 2 + c] = second;
      }
  };
  if (model::eager) return product();
  model::block.products[current].back().push_back(product);
}

}  // namespace numinous

namespace model {

inline void (*body)();
inline void start() {
  body();
  if (block.products[block.current].size() != 1 || !block.products[block.current].back().empty()) fail("products that nobody waits for");
  for (const auto& copies : block.row_copies[block.current])
    if (!copies.empty()) fail("copies that nobody waits for");
  block.done[block.current] = true;
  ++block.ended;
  progress();
  while (true) yield();
}

// Runs `run` in a block of `threads` threads, or in the blocks of a cluster; null, or what went wrong.
inline const char* run_block(void (*run)(), unsigned threads, unsigned shared, unsigned blocks = 1) {
  body = run;
  block = Block{};
  threads *= blocks;
  block.threads = threads;
  block.blocks = blocks;
  block.memory.assign((256 + shared + 15) / 16 * 16 * blocks, 0xff);
  block.contexts.resize(threads);
  block.done.assign(threads, false);
  block.warps.resize(threads / 32);
  block.products.assign(threads, std::vector<std::vector<std::function<void()>>>(1));
  block.row_copies.assign(threads, std::vector<std::vector<std::function<void()>>>(1));
  for (auto& turn : block.fragments) turn.assign(4 * threads, 0);
  block.fragment_turn.assign(threads, 0);
  constexpr size_t kStack = 96 * 1024;
  for (unsigned i = 0; i < threads; ++i) {
    block.stacks.emplace_back(new char[kStack]);
    getcontext(&block.contexts[i]);
    block.contexts[i].uc_stack.ss_sp = block.stacks[i].get();
    block.contexts[i].uc_stack.ss_size = kStack;
    makecontext(&block.contexts[i], start, 0);
  }
  // A warp runs as far as it can get alone, so that a barrier that is missing is missed; first to last, then last to first.
  const unsigned warps = threads / 32;
  for (unsigned left = threads; left != 0; ++block.turn) {
    left = 0;
    for (unsigned w = 0; w < warps; ++w) {
      const unsigned first = (block.turn % 2 == 0 ? w : warps - 1 - w) * 32;
      if (int(first / 128) == slow && block.turn % 4 != 3) {
        ++left;
        continue;
      }
      do {
        block.moved = false;
        for (unsigned i = first; i < first + 32; ++i) {
          if (block.done[i]) continue;
          block.current = i;
          swapcontext(&block.scheduler, &block.contexts[i]);
          if (block.fault != nullptr) return block.fault;
        }
      } while (block.moved);
      for (unsigned i = first; i < first + 32; ++i) left += !block.done[i];
    }
    if (++block.idle > patience()) return "threads wait for one another";
  }
  return block.asked.empty() ? nullptr : "a row is asked for and not read";
}

}  // namespace model
