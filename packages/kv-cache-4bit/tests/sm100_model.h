// SPDX-License-Identifier: Apache-2.0
//
// tcgen05 and tensor memory of sm_100a on the CPU, in place of csrc/sparse_mla_decode/sm100.cuh, on top of the block of threads of
// sm90_model.h. Written from the PTX manual's chapter on tcgen05: descriptors decoded bit by bit, reserved bits checked; lanes and
// columns of accumulators with M 64 and 128; which lanes a warp reaches; shapes 16x256b and 32x32b; allocation.
//
// Nothing happens earlier than it must: products run when every thread waits (or, where `eager`, when they are committed), loads from
// tensor memory arrive at wait::ld, stores at wait::st. Seen as faults: operands that no proxy fence has made visible, a wait without
// the fence behind it, an arrival without the fence before it, tensor memory that is not allocated or not given back.
// Not modelled: products that overtake one another, reads of operands while others are written, time.

#pragma once

#define store_shared untracked_store_shared
#define barrier_wait plain_barrier_wait
#define barrier_arrive plain_barrier_arrive
#define run_block run_plain_block
#include "sm90_model.h"
#undef store_shared
#undef barrier_wait
#undef barrier_arrive
#undef run_block

#include <functional>

namespace model {

constexpr uint32_t kLanes = 128, kColumns = 512;

struct Access {  // of one register of a thread
  float* to;
  float value;
  uint32_t lane, column;
};

struct OneThread {
  bool waited = false, unfenced = false;  // fences of tcgen05 that are due
  std::vector<Access> loads, stores;
  std::vector<uint32_t> written;  // shared memory, in units of two bytes, since the last proxy fence
};

struct Tensor {
  std::vector<float> memory;
  uint32_t first = 0, columns = 0;  // allocated
  int taking = 0, giving = 0;       // threads of a warp that have come
  bool given_back = false, taken = false;
  std::vector<std::function<void()>> issued;  // products and commits in order; null is the end of a commit's group
  std::vector<OneThread> threads;
  std::vector<uint16_t> writer;  // of two bytes of shared memory: thread + 1 where no proxy fence came after
};
inline Tensor tensor;

inline void start_tensor(unsigned threads, unsigned shared) {
  tensor = Tensor{};
  tensor.memory.assign(kLanes * kColumns, NAN);
  tensor.threads.resize(threads);
  tensor.writer.assign((256 + shared + 15) / 2 + 8, 0);
}
inline OneThread& self() { return tensor.threads[block.current]; }

// The oldest commit and the products before it.
inline bool complete_one() {
  size_t done = 0;
  bool committed = false;
  while (done < tensor.issued.size() && !committed) {
    if (tensor.issued[done]) tensor.issued[done]();
    else committed = true;
    ++done;
  }
  tensor.issued.erase(tensor.issued.begin(), tensor.issued.begin() + long(done));
  return committed;
}

inline float& cell(uint32_t lane, uint32_t column) {
  if (lane >= kLanes || column < tensor.first || column >= tensor.first + tensor.columns)
    fail("tensor memory that is not allocated");
  return tensor.memory[lane * kColumns + column];
}

// What every instruction of tcgen05 needs, by a thread that reaches lanes `lane` … of its warp's quarter.
inline void check_order() {
  if (self().waited) fail("no tcgen05.fence::after_thread_sync behind a wait");
}
inline void check_quarter(uint32_t lane, uint32_t lanes) {
  check_order();
  const uint32_t quarter = block.current / 32 % 4 * 32;
  if (lane != quarter && !(lanes == 16 && lane == quarter + 16)) fail("lanes that the warp does not reach");
  self().unfenced = true;
}

// Element (outer, inner) of an operand of 16 inner values through its descriptor.
inline float element(uint64_t descriptor, bool mn_major, int outer, int inner) {
  const auto bits = [&](int from, int count) { return uint32_t(descriptor >> from & ((uint64_t(1) << count) - 1)); };
  if (bits(46, 3) != 1) fail("bits 46 … 48 of a shared memory descriptor are not 0b001");
  if (bits(61, 3) != 2) fail("not 128-byte swizzle");
  if (bits(14, 2) || bits(30, 2) || bits(49, 3) || bits(52, 1) || bits(53, 8)) fail("a bit of a descriptor that has to be 0");
  const uint32_t start = bits(0, 14) * 16, leading = bits(16, 14) * 16, stride = bits(32, 14) * 16;
  const uint32_t plain = mn_major ? start + outer % 64 * 2 + outer / 64 * leading + inner % 8 * 128 + inner / 8 * stride
                                  : start + outer % 8 * 128 + outer / 8 * stride + inner * 2;
  const uint32_t address = plain ^ (plain >> 7 & 7) << 4;
  uint16_t value;
  std::memcpy(&value, at(address, 2), 2);
  if (tensor.writer[address / 2] != 0) fail("an operand that no proxy fence has made visible");
  return numinous::bf16_value(value);
}

inline void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  const auto bits = [&](int from, int count) { return instruction >> from & ((1u << count) - 1); };
  if (bits(4, 2) != 1 || bits(7, 3) != 1 || bits(10, 3) != 1) fail("the instruction descriptor is not bf16 × bf16 to fp32");
  if (bits(0, 4) || bits(6, 1) || bits(13, 2) || bits(23, 1) || bits(29, 3)) fail("a bit of the instruction descriptor that has to be 0");
  const int n = int(8 * bits(17, 6)), m = int(16 * bits(24, 5));
  if ((m != 64 && m != 128) || n < 8 || n > 256) fail("no such shape of tcgen05.mma");
  const uint32_t lane = d >> 16, column = d & 0xffff;
  if (lane != 0 && !(m == 64 && lane == 16)) fail("D has to begin in lane 0");
  std::vector<float> left(m * 16), right(n * 16);
  for (int i = 0; i < m * 16; ++i) left[i] = element(a, bits(15, 1), i / 16, i % 16);
  for (int i = 0; i < n * 16; ++i) right[i] = element(b, bits(16, 1), i / 16, i % 16);
  for (int row = 0; row < m; ++row) {
    const uint32_t in = lane + (m == 64 ? uint32_t(row / 16 * 32 + row % 16) : uint32_t(row));
    for (int c = 0; c < n; ++c) {
      float& to = cell(in, column + uint32_t(c));
      float total = add ? to : 0.0f;
      for (int k = 0; k < 16; ++k) total += left[row * 16 + k] * right[c * 16 + k];
      to = total;
    }
  }
}

// As in sm90_model.h.
inline const char* run_block(void (*run)(), unsigned threads, unsigned shared, unsigned) {
  start_tensor(threads, shared);
  if (const char* fault = run_plain_block(run, threads, shared)) return fault;
  if (!tensor.issued.empty()) return "products that nobody waits for";
  return tensor.taken && !tensor.given_back ? "tensor memory is not given back" : nullptr;
}

}  // namespace model

namespace numinous {

inline bool elected() { return model::block.current % 32 == 0; }

template <class T> void store_shared(uint32_t to, T v) {
  untracked_store_shared(to, v);
  for (uint32_t i = 0; i < sizeof v; i += 2) {
    model::tensor.writer[(to + i) / 2] = uint16_t(model::block.current + 1);
    model::self().written.push_back((to + i) / 2);
  }
}
inline void fence_for_mma() {
  for (const uint32_t at : model::self().written)
    if (model::tensor.writer[at] == model::block.current + 1) model::tensor.writer[at] = 0;
  model::self().written.clear();
}
inline void fence_before_sync() { model::self().unfenced = false; }
inline void fence_after_sync() { model::self().waited = false; }

inline void barrier_arrive(uint32_t at) {
  if (model::self().unfenced) model::fail("no tcgen05.fence::before_thread_sync before an arrival");
  if (!model::self().loads.empty() || !model::self().stores.empty()) model::fail("an arrival with tensor memory under way");
  plain_barrier_arrive(at);
}
inline void barrier_wait(uint32_t at, uint32_t parity) {
  model::MBarrier& barrier = model::block.barriers.at(at);
  while (barrier.phase % 2 == parity) {
    // Every thread has gone as far as it can.
    if (model::block.idle > 0 && model::complete_one()) model::progress();
    else model::yield();
  }
  model::self().waited = true;
}

inline void tensor_memory_take(uint32_t to, uint32_t columns) {
  model::Tensor& t = model::tensor;
  if (columns < 32 || columns > model::kColumns || (columns & (columns - 1)) != 0) model::fail("columns that cannot be allocated");
  if (++t.taking < 32) return;
  if (t.taken) model::fail("tensor memory is taken twice");
  t.taken = true;
  t.first = model::kColumns - columns;
  t.columns = columns;
  std::memcpy(model::at(to, 4), &t.first, 4);
}
inline void tensor_memory_give_back(uint32_t at, uint32_t columns) {
  model::Tensor& t = model::tensor;
  model::check_order();
  if (at != t.first || columns != t.columns) model::fail("other tensor memory is given back than was taken");
  for (const model::OneThread& thread : t.threads)
    if (!thread.loads.empty() || !thread.stores.empty() || thread.unfenced) model::fail("tensor memory in use is given back");
  t.given_back = ++t.giving == 32;
}

template <int kRegisters> void load_fragment(float (&v)[kRegisters], uint32_t at) {  // 16x256b
  model::check_quarter(at >> 16, 16);
  const uint32_t lane = model::block.current % 32;
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = NAN;
    model::self().loads.push_back({&v[i], 0.0f, (at >> 16) + lane / 4 + i % 4 / 2 * 8, (at & 0xffff) + i / 4 * 8 + lane % 4 * 2 + i % 2});
  }
}
template <int kRegisters> void load_lanes(float (&v)[kRegisters], uint32_t at) {  // 32x32b
  model::check_quarter(at >> 16, 32);
  for (uint32_t i = 0; i < kRegisters; ++i) {
    v[i] = NAN;
    model::self().loads.push_back({&v[i], 0.0f, (at >> 16) + model::block.current % 32, (at & 0xffff) + i});
  }
}
template <int kRegisters> void store_lanes(uint32_t at, const float (&v)[kRegisters]) {
  model::check_quarter(at >> 16, 32);
  for (uint32_t i = 0; i < kRegisters; ++i)
    model::self().stores.push_back({nullptr, v[i], (at >> 16) + model::block.current % 32, (at & 0xffff) + i});
}
template <int kRegisters> void wait_for_loads(float (&)[kRegisters]) {
  for (const model::Access& x : model::self().loads) *x.to = model::cell(x.lane, x.column);
  model::self().loads.clear();
}
inline void wait_for_stores() {
  for (const model::Access& x : model::self().stores) model::cell(x.lane, x.column) = x.value;
  model::self().stores.clear();
}

inline void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  model::check_order();
  model::tensor.issued.push_back([=] { model::multiply(d, a, b, instruction, add); });
}
inline void mma_commit(uint32_t barrier) {
  model::check_order();
  model::tensor.issued.push_back([=] { plain_barrier_arrive(barrier); });
  model::tensor.issued.push_back(nullptr);
  if (model::eager) model::complete_one();
}

}  // namespace numinous
