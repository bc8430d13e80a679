// SPDX-License-Identifier: Apache-2.0
//
// Extend attention on Hopper for large heads: out = softmax(scale · q · Kᵀ) · V over a prefix, whose rows lie anywhere in a pool, and a chunk.
//
// A cluster of two blocks has 128 rows, (token, head of the group) pairs, and walks tiles of 64 keys. Each block has one half of the values of V:
// two consumer warpgroups of 64 rows hold 64 × 256 of the output each. Scores are made once: those of even tiles by the first
// block, of odd tiles by the second. What the other block needs of them are probabilities as operand A of a product, and these are the same
// registers of the same thread there: a thread sends its 64 bytes to its peer, by way of that block's shared memory, and the tile's
// exponents. So K is read by one block only and half of V by each: 128 FLOPs for every byte that leaves L2.
//
// Exponents that probabilities are relative to are whole: what one block takes from the other is brought to its own by powers of two, exactly.
//
// The third warpgroup fills a ring of stages with `cp.async`: 64 keys × 128 values, of K or of V, in the order in which both consumers read
// them: K of a tile of its own, V of the peer's before it, V of its own. `layout.cuh` has every address, `sm90.cuh` every instruction.
//
// Compiled for one head dim, NUMINOUS_DIM. With NUMINOUS_DEBUG=1, the first cluster writes its first tile to `debug`.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "layout.cuh"
#ifdef NUMINOUS_MODEL  // the tests' model of a cluster on the CPU
#include NUMINOUS_MODEL
#else
#include "sm90.cuh"
#endif

namespace numinous {

struct Params {
  const uint16_t *q, *k, *v, *k_pool, *v_pool;  // bf16
  const void *qo_indptr, *kv_indptr, *kv_indices;
  const void* sinks;  // fp32 or bf16 [heads], or null
  uint16_t* out;
  float* lse;  // [tokens, heads], or null
  float* debug;
  // Elements, of a token or slot and of a head.
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, k_slot, k_pool_head, v_slot, v_pool_head, out_token, out_head;
  int64_t listed;  // ids
  int heads, group, batch, tokens, slots;
  int window;  // negative: none
  int causal;
  int wide_rows, wide_lists, wide_ids;  // int64: qo_indptr, kv_indptr, kv_indices
  int wide_sinks;                       // fp32
  float factor;  // of scores, for exponents to base 2; with a cap of 2 · score / cap
  float cap;     // times log2(e); 0: none
};

constexpr int kConsumers = 256, kThreads = 384;
constexpr int kWarpgroup = 1;  // the first warpgroup's barrier, the second's is the next; 0 is __syncthreads
// Of a thread; 2 × 216 + 72 = 3 × 168.
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr float kInf = INFINITY;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ int64_t entry(const void* table, int64_t at, int wide) {
  return wide ? static_cast<const int64_t*>(table)[at] : static_cast<const int*>(table)[at];
}

// --- Work ---------------------------------------------------------------------------------------------------------------------

struct Work {
  int64_t begin;   // the chunk's first token
  int64_t listed;  // the prefix's first id
  int kv_head, first_row, chunk, prefix;
  int first, last;  // tokens of the chunk that the rows are of
  int low_prefix, low_chunk, high_chunk;  // keys from which tiles are walked; where the chunk ends
  int prefix_tiles, tiles;  // of all at least one: no window is so short that a token does not see itself

  __device__ __forceinline__ bool in_prefix(int tile) const { return tile < prefix_tiles; }
  // First key of a tile, and where keys end.
  __device__ __forceinline__ int start(int tile) const {
    return in_prefix(tile) ? low_prefix + tile * kKeys : low_chunk + (tile - prefix_tiles) * kKeys;
  }
  __device__ __forceinline__ int limit(int tile) const { return in_prefix(tile) ? prefix : high_chunk; }
};

__device__ __forceinline__ int tiles_of(int low, int high) { return high > low ? (high - low + kKeys - 1) / kKeys : 0; }
__device__ __forceinline__ int first_key(int at) { return at > 0 ? at / kKeys * kKeys : 0; }

// The last rows come first: they have the most keys of a causal chunk. Whether there is any.
__device__ __forceinline__ bool work_of(const Params& p, Work& w) {
  const int64_t tile = gridDim.x / 2 - 1 - blockIdx.x / 2;
  w.kv_head = int(blockIdx.y);
  int request = 0;
  for (int high = p.batch; high - request > 1;) {
    const int middle = (request + high) / 2;
    if (first_tile(entry(p.qo_indptr, middle, p.wide_rows), p.group, middle) <= tile) {
      request = middle;
    } else {
      high = middle;
    }
  }
  w.begin = entry(p.qo_indptr, request, p.wide_rows);
  int64_t end = entry(p.qo_indptr, request + 1, p.wide_rows);
  if (end > p.tokens) end = p.tokens;
  w.chunk = int(end - w.begin);
  w.first_row = int((tile - first_tile(w.begin, p.group, request)) * kRows);
  if (w.first_row < 0 || w.first_row >= w.chunk * p.group) return false;
  w.listed = entry(p.kv_indptr, request, p.wide_lists);
  int64_t listed_end = entry(p.kv_indptr, request + 1, p.wide_lists);
  if (listed_end > p.listed) listed_end = p.listed;
  w.prefix = listed_end > w.listed ? int(listed_end - w.listed) : 0;
  w.first = w.first_row / p.group;
  w.last = (w.first_row + kRows - 1) / p.group;
  if (w.last >= w.chunk) w.last = w.chunk - 1;
  w.low_prefix = p.window < 0 ? 0 : first_key(w.prefix + w.first - p.window);
  w.low_chunk = p.window < 0 ? 0 : first_key(w.first - p.window);
  w.high_chunk = p.causal ? w.last + 1 : w.chunk;
  w.prefix_tiles = tiles_of(w.low_prefix, w.prefix);
  w.tiles = w.prefix_tiles + tiles_of(w.low_chunk, w.high_chunk);
  return true;
}

// Token and head of a row of the cluster.
struct Row {
  int token, head;
  bool live;

  __device__ __forceinline__ Row(const Params& p, const Work& w, int row) {
    const int at = w.first_row + row;
    token = at / p.group;
    head = w.kv_head * p.group + at % p.group;
    live = at < w.chunk * p.group;
  }
};

// Where the next stage of the ring is, of whoever fills or reads it.
struct Ring {
  int stage = 0, turn = 0;  // turn: parity of the rounds behind it

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      turn ^= 1;
    }
  }
};

static_assert(sizeof(Work) == kWorkBytes, "room for it");

// --- Producer -----------------------------------------------------------------------------------------------------------------

constexpr int kRowsOfThread = kKeys / 16;  // a thread copies one of eight chunks of 16 bytes of every 16th key

// What the list has for a thread's keys of a tile: nothing is done with it before it is used, so that its load is not waited for.
struct Entries {
  int low[kRowsOfThread], high[kRowsOfThread];

  __device__ __forceinline__ void fetch(const Params& p, const Work& w, int tile, int row) {
    const bool in_prefix = w.in_prefix(tile);
    const int start = w.start(tile) + row, limit = tile < w.tiles ? w.limit(tile) : 0;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int at = start + 16 * i;
      low[i] = at < limit ? at : -1;
      high[i] = 0;
      if (in_prefix && at < limit) {
        const int* id = static_cast<const int*>(p.kv_indices) + (w.listed + at) * (p.wide_ids ? 2 : 1);
        low[i] = id[0];
        if (p.wide_ids) high[i] = id[1];
      }
    }
  }
  // In `low` then are slots of a pool, or tokens of the chunk; negative where there is none.
  __device__ __forceinline__ void resolve(const Params& p, bool in_prefix) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i)
      if (high[i] != 0 || (in_prefix && low[i] >= p.slots)) low[i] = -1;
  }
};

__device__ __forceinline__ void produce(const Params& p, const Work& w, int rank, uint8_t* shared) {
  const int thread = threadIdx.x % 128, chunk = thread % 8, row = thread / 8;
  const uint32_t base = shared_address(shared), to = base + Plan::kRing + swizzled(row, chunk);
  float* bias = reinterpret_cast<float*>(shared + Plan::kBias);
  Ring ring;
  // Values `from` … of a tile's keys.
  const auto fill = [&](const uint16_t* from, int64_t stride, int stages, const Entries& keys) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage, from += kStageDims) {
      barrier_wait(base + Plan::kEmpty + 8 * ring.stage, ring.turn ^ 1);
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int at = anew(keys.low[i]);  // addresses of all rows would not fit in a producer's registers
        const uint16_t* key = from + (at < 0 ? 0 : at) * stride;
#pragma unroll
        for (int panel = 0; panel < 2; ++panel)
          copy_16(to + ring.stage * kStageBytes + panel * kPanelBytes + i * 2 * kGroupBytes, key + panel * kPanelDims, at >= 0);
      }
      arrive_after_copies(base + Plan::kFull + 8 * ring.stage);
      ring.next();
    }
  };
  const auto fill_values = [&](bool in_prefix, const Entries& keys) {
    const uint16_t* from = in_prefix ? p.v_pool + w.kv_head * p.v_pool_head : p.v + w.begin * p.v_token + w.kv_head * p.v_head;
    fill(from + rank * kHalf + 8 * chunk, in_prefix ? p.v_slot : p.v_token, kVStages, keys);
  };

  Entries own, theirs;
  own.fetch(p, w, rank, row);
  theirs.fetch(p, w, 1 - rank, row);
#pragma unroll 1
  for (int own_tile = rank, their_tile = -1 - rank; own_tile < w.tiles || their_tile < w.tiles; own_tile += 2, their_tile += 2) {
    const bool in_prefix = w.in_prefix(own_tile);
    if (own_tile < w.tiles) {
      own.resolve(p, in_prefix);
      const int buffer = own_tile >> 1 & 1;
      if (in_prefix && chunk == 0) {
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) bias[buffer * kKeys + row + 16 * i] = own.low[i] < 0 ? -kInf : 0.0f;
        barrier_arrive(base + Plan::kBiased + 8 * buffer);
      }
      const uint16_t* from = in_prefix ? p.k_pool + w.kv_head * p.k_pool_head : p.k + w.begin * p.k_token + w.kv_head * p.k_head;
      fill(from + 8 * chunk, in_prefix ? p.k_slot : p.k_token, kKStages, own);
    }
    Entries next;
    next.fetch(p, w, own_tile + 2, row);
    if (their_tile >= 0 && their_tile < w.tiles) {
      const bool theirs_in_prefix = w.in_prefix(their_tile);
      theirs.resolve(p, theirs_in_prefix);
      fill_values(theirs_in_prefix, theirs);
      theirs.fetch(p, w, their_tile + 2, row);
    }
    if (own_tile < w.tiles) fill_values(in_prefix, own);
    own = next;
  }
  wait_for_copies();
}

// --- Consumers ----------------------------------------------------------------------------------------------------------------

#ifdef NUMINOUS_DEBUG
// debug: of the first cluster. K [64][dim] and V [64][half] of the first block's first tile, S [128][64], P [128][64]; P as the second took it.
constexpr int kDebugV = kKeys * kDim, kDebugS = kDebugV + kKeys * kHalf, kDebugP = kDebugS + kRows * kKeys, kDebugTaken = kDebugP + kRows * kKeys;

__device__ void dump_stage(float* to, int stride, const uint8_t* stage) {
  for (int i = threadIdx.x; i < kKeys * kStageDims; i += 128) {
    const int key = i / kStageDims, dim = i % kStageDims;
    const uint8_t* at = stage + dim / kPanelDims * kPanelBytes + swizzled(key, dim % kPanelDims / 8) + dim % 8 * 2;
    to[key * stride + dim] = bf16_value(*reinterpret_cast<const uint16_t*>(at));
  }
}
#define NUMINOUS_DUMP(where, statement) \
  if (p.debug != nullptr && blockIdx.x / 2 == gridDim.x / 2 - 1 && blockIdx.y == 0 && (where)) { statement; }
#else
#define NUMINOUS_DUMP(where, statement)
#endif

// Exact, of a whole number up to 0.
__device__ __forceinline__ float power_of_two(float n) { return n < -126.0f ? 0.0f : __uint_as_float(uint32_t(int(n) + 127) << 23); }

// What is taken from a score, to base 2: 0 where there is none.
__device__ __forceinline__ float base_of(float exponent) { return exponent == -kInf ? 0.0f : exponent; }

__device__ __forceinline__ void load_q(const Params& p, const Work& w, int warpgroup, uint32_t base) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 64 * warpgroup + thread / 8 + 16 * i;
    const Row at(p, w, row);
    const uint16_t* from = p.q + (at.live ? (w.begin + at.token) * p.q_token + at.head * p.q_head : 0) + 8 * chunk;
#pragma unroll
    for (int panel = 0; panel < kDim / kPanelDims; ++panel)
      copy_16(base + Plan::kQ + panel * kQPanelBytes + swizzled(row, chunk), from + panel * kPanelDims, at.live);
  }
  wait_for_copies();
  fence_for_wgmma();
  named_barrier(kWarpgroup + warpgroup, 128);
}

__device__ __forceinline__ void consume(const Params& p, const Work& found, int rank, uint8_t* shared) {
  const int thread = threadIdx.x % 128, warpgroup = uniform(threadIdx.x / 128);
  const uint32_t base = shared_address(shared);
  // What is the warpgroup's in either block.
  const uint32_t peer = in_block(base, 1 - rank);
  const uint32_t inbox = Plan::kInbox + warpgroup * Plan::kInboxBytes + thread * 16, exponents = Plan::kExponents + 256 * warpgroup;
  const uint32_t arrived = Plan::kArrived + 8 * warpgroup, taken = Plan::kTaken + 8 * warpgroup;
  // Kept where it takes no registers.
  const Work& w = reinterpret_cast<Work*>(shared + Plan::kWork)[warpgroup];
  if (thread == 0) reinterpret_cast<Work*>(shared + Plan::kWork)[warpgroup] = found;
  load_q(p, found, warpgroup, base);
  const uint64_t q_at = descriptor(base + Plan::kQ + warpgroup * 64 * 128, 16, kGroupBytes);

  float o[kVStages][64];  // [row, 128 values] of each stage
#pragma unroll
  for (int i = 0; i < 64; ++i)
#pragma unroll
    for (int stage = 0; stage < kVStages; ++stage) o[stage][i] = 0.0f;
  // Of rows fragment_row(thread, 0) and 8 further: the exponent so far, whole; the sum of the thread's columns of own tiles.
  float most[2] = {-kInf, -kInf}, sum[2] = {0.0f, 0.0f};
  Ring ring;

  const auto stage_at = [&]() { return base + Plan::kRing + ring.stage * kStageBytes; };
  const auto await_stage = [&]() {
    barrier_wait(base + Plan::kFull + 8 * ring.stage, ring.turn);
    fence_for_wgmma();
  };
  const auto give_back = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(base + Plan::kEmpty + 8 * stage);
  };
  const auto own_tiles = [&]() { return (w.tiles + 1 - rank) / 2; };
  const auto their_tiles = [&]() { return (w.tiles + rank) / 2; };
  // Messages: one of each of the peer's tiles, then its sums. The next one is awaited as soon as one has come.
  const auto expect = [&](int message) {
    if (thread == 0) barrier_expect(base + arrived, message < their_tiles() ? Plan::kInboxBytes + 64 * 4 : 64 * 4);
  };
  expect(0);
  // The exponent rises to `now`.
  const auto rise = [&](const float (&now)[2]) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      alpha[r] = now[r] == most[r] ? 1.0f : power_of_two(most[r] - now[r]);
      most[r] = now[r];
      sum[r] *= alpha[r];
    }
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int stage = 0; stage < kVStages; ++stage)
#pragma unroll
        for (int i = 0; i < 64; ++i) o[stage][i] *= alpha[i % 4 / 2];
    }
  };
  // o += probabilities · V of the next stages, put under way.
  const auto multiply = [&](const uint32_t(&a)[16], auto between) {
#pragma unroll
    for (int stage = 0; stage < kVStages; ++stage) {
      await_stage();
      const uint64_t v_at = descriptor(stage_at(), kPanelBytes, kGroupBytes);
      hold(o[stage]);
      wgmma_fence();
      wgmma_values<0>(o[stage], a, further(v_at, mn_major_step(0)));
      wgmma_values<4>(o[stage], a, further(v_at, mn_major_step(1)));
      wgmma_values<8>(o[stage], a, further(v_at, mn_major_step(2)));
      wgmma_values<12>(o[stage], a, further(v_at, mn_major_step(3)));
      wgmma_commit();
      if (stage == 0) between();
      ring.next();
    }
  };
  // They are done.
  const auto finish = [&]() {
    wgmma_wait_but<0>();
    int stage = ring.stage < kVStages ? ring.stage + kStages - kVStages : ring.stage - kVStages;
#pragma unroll
    for (int i = 0; i < kVStages; ++i) {
      hold(o[i]);
      give_back(stage);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  };
  // The peer's next tile. `between` is done when its first products are under way.
  uint32_t theirs[16];
  const auto multiply_theirs = [&](int message, auto between) {
    wait_for_there(base + arrived, message & 1);
    expect(message + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = load_shared_4(base + inbox + i * 128 * 16);
      theirs[4 * i] = four.x;
      theirs[4 * i + 1] = four.y;
      theirs[4 * i + 2] = four.z;
      theirs[4 * i + 3] = four.w;
    }
    const float exponent[2] = {load_shared(base + exponents + 4 * fragment_row(thread, 0)), load_shared(base + exponents + 4 * fragment_row(thread, 2))};
    NUMINOUS_DUMP(message == 0 && rank == 1, for (int i = 0; i < 32; ++i)
      p.debug[kDebugTaken + (64 * warpgroup + fragment_row(thread, i)) * kKeys + fragment_column(thread, i)] =
          bf16_value(uint16_t(theirs[i / 2] >> 16 * (i % 2))))
    float now[2], less[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(most[r], exponent[r]);
      less[r] = exponent[r] == now[r] ? 1.0f : power_of_two(exponent[r] - now[r]);
    }
    if (__any_sync(~0u, less[0] != 1.0f || less[1] != 1.0f)) {
      const uint32_t by[2] = {bf16_pair(less[0], less[0]), bf16_pair(less[1], less[1])};
#pragma unroll
      for (int i = 0; i < 16; ++i) theirs[i] = multiply_bf16_pairs(theirs[i], by[i % 2]);
    }
    rise(now);
    multiply(theirs, between);
    // Products with it are under way, so all lanes have read it.
    if (threadIdx.x % 32 == 0) arrive_there(peer + taken);
  };
  // The block's own tile of a pair, and with `theirs` behind its scores the peer's of the pair before: its products go on during the softmax.
  const auto attend_pair = [&](int pair, auto with_theirs) {
    const int tile = 2 * pair + rank;
    float s[32];
    int before = 0;
#pragma unroll
    for (int stage = 0; stage < kKStages; ++stage) {
      await_stage();
      NUMINOUS_DUMP(tile == 0 && warpgroup == 0, dump_stage(p.debug + stage * kStageDims, kDim, shared + Plan::kRing + ring.stage * kStageBytes))
      const uint64_t k_at = descriptor(stage_at(), 16, kGroupBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kStageDims / 16; ++step)
        wgmma_scores(s, further(q_at, k_major_step(kQPanelBytes, stage * kStageDims / 16 + step)),
                     further(k_at, k_major_step(kPanelBytes, step)), stage + step > 0);
      wgmma_commit();
      if (stage > 0) {
        wgmma_wait_but<1>();
        give_back(before);
      }
      before = ring.stage;
      ring.next();
    }
    if constexpr (with_theirs) {
      multiply_theirs(pair - 1, [&]() {
        wgmma_wait_but<1>();  // scores are done
        give_back(before);
      });
    } else {
      wgmma_wait_but<0>();
      give_back(before);
    }
    hold(s);

    const bool in_prefix = w.in_prefix(tile);
    const int start = w.start(tile), limit = w.limit(tile), shift = in_prefix ? w.prefix : 0;
    float factor = p.factor;
    if (p.cap > 0.0f) {  // cap · tanh(x), x = score / cap
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = p.cap * (1.0f - divide_fast(2.0f, exp2_fast(s[i] * factor) + 1.0f));
      factor = 1.0f;
    }
    if (in_prefix) {
      barrier_wait(base + Plan::kBiased + 8 * (pair & 1), pair >> 1 & 1);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] += load_shared(base + Plan::kBias + 4 * ((pair & 1) * kKeys + fragment_column(thread, i)));
    }
    // A token sees keys from its position - window on, of the chunk up to itself.
    const auto lowest = [&](int of) { return p.window < 0 ? start : of + shift - p.window; };
    const auto highest = [&](int of) { return !in_prefix && p.causal && of < limit ? of : limit - 1; };
    if (lowest(w.last) > start || highest(w.first) < start + kKeys - 1) {
      int low[2], high[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = (w.first_row + 64 * warpgroup + fragment_row(thread, 2 * r)) / p.group;
        low[r] = lowest(token);
        high[r] = highest(token);
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int at = start + fragment_column(thread, i);
        if (at < low[i % 4 / 2] || at > high[i % 4 / 2]) s[i] = -kInf;
      }
    }
    float now[2] = {-kInf, -kInf}, added[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) now[i % 4 / 2] = fmaxf(now[i % 4 / 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
      now[r] = fmaxf(most[r], ceilf(now[r] * factor));
    }
    const float off[2] = {base_of(now[0]), base_of(now[1])};
    uint32_t own[16];
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i % 4 / 2;
      const float one = exp2_fast(s[i] * factor - off[r]), two = exp2_fast(s[i + 1] * factor - off[r]);
      added[r] += one + two;
      own[i / 2] = bf16_pair(one, two);
      NUMINOUS_DUMP(tile == 0, const int at = (64 * warpgroup + fragment_row(thread, i)) * kKeys + fragment_column(thread, i);
                    p.debug[kDebugS + at] = s[i]; p.debug[kDebugS + at + 1] = s[i + 1];
                    p.debug[kDebugP + at] = one; p.debug[kDebugP + at + 1] = two)
    }

    // To the peer. It has taken the message before.
    if (pair > 0) wait_for_there(base + taken, (pair - 1) & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      send(peer + inbox + i * 128 * 16, uint4{own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]}, peer + arrived);
    if (thread % 4 == 0) {
      send(peer + exponents + 4 * fragment_row(thread, 0), now[0], peer + arrived);
      send(peer + exponents + 4 * fragment_row(thread, 2), now[1], peer + arrived);
    }
    if constexpr (with_theirs) finish();
    rise(now);
    sum[0] += added[0];
    sum[1] += added[1];
    NUMINOUS_DUMP(tile == 0 && warpgroup == 0, Ring at = ring; for (int stage = 0; stage < kVStages; ++stage, at.next()) {
      barrier_wait(base + Plan::kFull + 8 * at.stage, at.turn);
      dump_stage(p.debug + kDebugV + stage * kStageDims, kHalf, shared + Plan::kRing + at.stage * kStageBytes);
    })
    multiply(own, [] {});
    finish();
  };

  if (own_tiles() > 0) attend_pair(0, std::false_type());
#pragma unroll 1
  for (int pair = 1; pair < own_tiles(); ++pair) attend_pair(pair, std::true_type());
  // Of the peer's tiles one, two or none are left.
#pragma unroll 1
  for (int message = own_tiles() > 0 ? own_tiles() - 1 : 0; message < their_tiles(); ++message) {
    multiply_theirs(message, [] {});
    finish();
  }

  // Both blocks have seen every exponent, so theirs are the same; sums are of own tiles. After the peer's have come, it writes here no more.
  float total[2];
  const int sent = own_tiles();
  if (sent > 0) wait_for_there(base + taken, (sent - 1) & 1);
  const uint32_t sums = Plan::kSums + 256 * warpgroup;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    if (thread % 4 == 0) send(peer + sums + 4 * fragment_row(thread, 2 * r), sum[r], peer + arrived);
  }
  wait_for_there(base + arrived, their_tiles() & 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) total[r] = sum[r] + load_shared(base + sums + 4 * fragment_row(thread, 2 * r));

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Row at(p, w, 64 * warpgroup + fragment_row(thread, 2 * r));
    if (!at.live) continue;
    const bool none = total[r] == 0.0f;
    const float off = base_of(most[r]);
    if (p.lse != nullptr && rank == 0 && thread % 4 == 0)
      p.lse[(w.begin + at.token) * p.heads + at.head] = none ? -kInf : (off + log2_fast(total[r])) * kLn2;
    if (p.sinks != nullptr) {
      const float sink = p.wide_sinks ? static_cast<const float*>(p.sinks)[at.head] : bf16_value(static_cast<const uint16_t*>(p.sinks)[at.head]);
      total[r] += exp2_fast(sink * kLog2E - off);
    }
    const float share = none ? 0.0f : 1.0f / total[r];
    uint16_t* to = p.out + (w.begin + at.token) * p.out_token + at.head * p.out_head + rank * kHalf + thread % 4 * 2;
#pragma unroll
    for (int stage = 0; stage < kVStages; ++stage)
#pragma unroll
      for (int i = 2 * r; i < 64; i += 4)
        *reinterpret_cast<uint32_t*>(to + stage * kStageDims + i / 4 * 8) = bf16_pair(o[stage][i] * share, o[stage][i + 1] * share);
  }
}

// --- Kernel -------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint8_t* shared_memory() {
  uint8_t* shared = dynamic_shared();
  return shared + (1024 - shared_address(shared) % 1024) % 1024;
}

// Threads 0 … 255 consume, the rest produce.
__device__ __forceinline__ void attend(const Params& p) {
  if (threadIdx.x == 0) {
    const uint32_t base = shared_address(shared_memory());
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(base + Plan::kFull + 8 * stage, 128);
      barrier_init(base + Plan::kEmpty + 8 * stage, kConsumers / 32);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + Plan::kBiased + 8 * i, 16);
      barrier_init(base + Plan::kArrived + 8 * i, 1);
      barrier_init(base + Plan::kTaken + 8 * i, 4);
    }
    fence_after_init();
  }
  cluster_barrier();

  // Each finds its work for itself: what both have in common would lie in registers that only one can spare.
  if (threadIdx.x >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    Work w;
    if (work_of(p, w)) produce(p, w, cluster_rank(), shared_memory());
  } else {
    more_registers<kConsumerRegisters>();
    Work w;
    if (work_of(p, w)) consume(p, w, cluster_rank(), shared_memory());
  }
}

}  // namespace numinous

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(numinous::kThreads, 1)
    extend(const __grid_constant__ numinous::Params p) {
  numinous::attend(p);
}
