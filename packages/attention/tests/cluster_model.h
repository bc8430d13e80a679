// SPDX-License-Identifier: Apache-2.0
//
// In place of csrc/extend_attention/sm90.cuh: a model of a cluster of two blocks of sm_90a on the CPU. What one block does is modelled in
// packages/kv-cache-4bit/tests/sm90_model.h, NUMINOUS_BLOCK_MODEL; here stand operands in registers, copies to
// shared memory and what goes from block to block. Copies are done when the thread that asked for them waits for something, messages arrive
// when any thread does; eager, both at once. One block can be slower than the other. What copies and stores have in order here, they may have
// in another one there: that a list's ids are awaited apart from the copies behind them is not seen.

#pragma once

#include NUMINOUS_BLOCK_MODEL

#define __cluster_dims__(...)
inline Index gridDim;



namespace model {

struct Later {
  std::vector<std::function<void()>> done;
};
inline Later mail;                          // to other blocks
inline std::vector<Later> copies;           // of each thread: 16 bytes each, and arrivals behind them
inline std::vector<uint32_t> operands[2];   // of each thread's last two products with registers: four a thread
inline std::vector<unsigned> operand_turn;  // of each thread

inline int slowness[2] = {0, 0};  // turns of all threads that products of a block take
inline void dawdle() {
  for (int turn = 0; turn < slowness[rank()]; ++turn) {
    block.idle = 0;
    yield();
  }
}

inline void flush(Later& what) {
  std::vector<std::function<void()>> now;
  now.swap(what.done);
  for (const auto& one : now) one();
}
inline void flush_copies() { flush(copies[block.current]); }

inline uint8_t* of_block(uint32_t address, uint32_t bytes) {  // an address that `in_block` made
  const size_t size = block.memory.size() / block.blocks;
  const uint32_t there = address >> 24, at = address & 0xffffff;
  if (there == 0 || there > block.blocks) fail("not an address of the cluster");
  if (at % bytes != 0 || at + bytes > size) fail("access to the other block is misaligned or out of bounds");
  return block.memory.data() + (there - 1) * size + at;
}

// An mbarrier that also counts bytes.
struct Bytes { long expected = 0; };
inline std::map<uint32_t, Bytes> transfers;  // by the barrier's key

inline void settle(uint32_t key) {
  MBarrier& barrier = block.barriers.at(key);
  if (barrier.pending == 0 && transfers[key].expected == 0) {
    barrier.pending = barrier.count;
    ++barrier.phase;
    progress();
  }
}
inline uint32_t key_of(uint32_t address) { return ((address >> 24) - 1) << 24 | (address & 0xffffff); }

}  // namespace model

namespace numinous {

inline float divide_fast(float a, float b) { return a / b; }

inline int anew(int v) { return v; }
inline uint32_t in_block(uint32_t at, int rank) { return uint32_t(rank + 1) << 24 | at; }

// A wait that is over at once flushes nothing: the copies may still be under way.
inline void wait_flushing(uint32_t at, uint32_t parity) {
  model::MBarrier& barrier = model::block.barriers.at(model::rank() << 24 | at);
  while (barrier.phase % 2 == parity) {
    model::flush_copies();
    model::flush(model::mail);
    model::yield();
  }
}
inline void wait_for_there(uint32_t at, uint32_t parity) { wait_flushing(at, parity); }

inline void barrier_expect(uint32_t at, uint32_t bytes) {
  const uint32_t key = model::rank() << 24 | at;
  model::transfers[key].expected += bytes;
  model::MBarrier& barrier = model::block.barriers.at(key);
  if (barrier.pending == 0) model::fail("a barrier has more arrivals than it counts");
  --barrier.pending;
  model::settle(key);
}
inline void arrive_there(uint32_t at) {
  const uint32_t key = model::key_of(at);
  model::MBarrier& barrier = model::block.barriers.at(key);
  if (--barrier.pending < 0) model::fail("a barrier has more arrivals than it counts");
  model::settle(key);
}
template <class T> void send(uint32_t at, T v, uint32_t barrier) {
  if (at >> 24 != barrier >> 24) model::fail("a message to one block, its barrier in another");
  uint8_t* to = model::of_block(at, sizeof v);
  const uint32_t key = model::key_of(barrier);
  const auto deliver = [=] {
    std::memcpy(to, &v, sizeof v);
    model::transfers[key].expected -= sizeof v;
    model::settle(key);
  };
  if (model::eager) return deliver();
  model::mail.done.push_back(deliver);
}

template <class T> T loaded(uint32_t from) {
  T v;
  std::memcpy(&v, model::at(from, sizeof v), sizeof v);
  return v;
}
inline float load_shared(uint32_t at) { return loaded<float>(at); }
inline uint4 load_shared_4(uint32_t at) { return loaded<uint4>(at); }

inline void copy_16(uint32_t to, const uint16_t* from, bool there) {
  if (there && reinterpret_cast<uintptr_t>(from) % 16 != 0) model::fail("misaligned copy");
  uint8_t* at = model::at(to, 16);
  const auto copy = [=] {
    if (there) {
      std::memcpy(at, from, 16);
    } else {
      std::memset(at, 0, 16);
    }
  };
  if (model::eager) return copy();
  model::copies[model::block.current].done.push_back(copy);
}
inline void arrive_after_copies(uint32_t at) {
  if (model::eager) return barrier_arrive(at);
  model::copies[model::block.current].done.push_back([at] { barrier_arrive(at); });
}
inline void wait_for_copies() { model::flush_copies(); }

// Those that are done are the oldest.
template <int kPending> void wgmma_wait_but() {
  auto& groups = model::block.products[model::block.current];
  if (!groups.back().empty()) model::fail("products that no group has");
  model::dawdle();
  while (int(groups.size()) > kPending + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  model::exchanged(0, 0);
}

inline void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, bool add) { wgmma<false, false>(d, a, b, add); }

// A fragment of 64 × 16: registers 0 and 2 have row lane / 4, inner values 2 · (lane % 4) and 8 further; 1 and 3 the row 8 below.
template <int kFirst> void wgmma_values(float (&d)[64], const uint32_t (&a)[16], uint64_t b) {
  const unsigned current = model::block.current, turn = model::operand_turn[current]++ % 2;
  std::copy(a + kFirst, a + kFirst + 4, model::operands[turn].begin() + 4 * current);
  model::exchanged(0, 0);  // a lane that is ahead writes those of the other turn
  std::vector<float> rows(32);
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = model::operands[turn][4 * (current / 4 * 4 + lane) + i];
      for (int half = 0; half < 2; ++half) rows[i % 2 * 16 + i / 2 * 8 + 2 * lane + half] = bf16_value(uint16_t(pair >> 16 * half));
    }
  const std::vector<uint32_t> issued(a + kFirst, a + kFirst + 4);
  const uint32_t* registers = a + kFirst;
  const auto product = [&d, b, rows, issued, registers] {
    if (!std::equal(issued.begin(), issued.end(), registers)) model::fail("an operand in registers changes under way");
    const int lane = int(model::block.current % 32);
    for (int i = 0; i < 64; i += 4)
      for (int c = 0; c < 2; ++c)
        for (int k = 0; k < 16; ++k) {
          const float value = operand(b, true, 2 * i + 2 * (lane % 4) + c, k);
          d[i + c] += rows[k] * value;
          d[i + 2 + c] += rows[16 + k] * value;
        }
  };
  if (model::eager) return product();
  model::block.products[current].back().push_back(product);
}

}  // namespace numinous

// What the kernel calls, of what both models have, with copies under way in mind.
#define barrier_wait wait_flushing

namespace model {

// The threads' state of this model, then a run of a cluster.
inline const char* run_cluster(void (*run)(), unsigned threads, unsigned shared) {
  copies.assign(2 * threads, {});
  operand_turn.assign(2 * threads, 0);
  for (auto& turn : operands) turn.assign(8 * threads, 0);
  transfers.clear();
  mail.done.clear();
  const char* fault = run_block(run, threads, shared, 2);
  if (fault != nullptr) return fault;
  for (const auto& one : copies)
    if (!one.done.empty()) return "copies that nobody waits for";
  if (!mail.done.empty()) return "messages that nobody waits for";
  return nullptr;
}

}  // namespace model
