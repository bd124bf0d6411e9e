// Attention of a decode step with retrieval: one call for a layer, with all of its sessions and heads.
#include "head.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

// Rows of a head that are copied, as `Gather` of gather.py.
struct Gather {
  const char* const* pages;  // as those of `Searched`
  int64_t part;              // bytes from a page to [heads, page_rows, row_bytes]
  int64_t page_rows, row_bytes;
  int64_t heads, count;
  const int64_t* positions;  // [heads, count]
  char* out;                 // [heads, count, row_bytes]
};

// Keys of a page that are coded, as `Encode` of encode.py: `encode_keys` of kvstore/index/key_codes.py.
struct Encode {
  const char* rows;        // [layers, parts, heads, page_rows, dim]
  int64_t layers, parts, heads, page_rows, dim;
  float* scales;           // [layers, heads, padded page_rows]
  uint8_t* codes;          // [layers, heads, padded page_rows / 8, quads, 8, 4]; all 0
};

// Keys of a layer that are summarised, as `Summarise` of summarise.py: `KeySummaries` of kvstore/index/summaries.py.
struct Summarise {
  const char* const* pages;  // as those of `Searched`
  int64_t keys;              // as that of `Searched`
  int64_t page_rows, heads, dim;
  const int64_t* levels;  // as `summaries` of `Searched`, of this layer
  int64_t before, rows;   // rows whose nodes are there, and all
};

// Numbers of all sessions and heads, as `Heads` of heads.py; those of one head lie one after the other.
struct Heads {
  const void* data;
  int64_t session_stride, head_stride;  // in numbers

  template <typename T>
  const T* at(int64_t session, int64_t head) const {
    return (const T*)data + session * session_stride + head * head_stride;
  }
};

// Of one layer, as `Call` of call.py.
struct Call {
  Heads queries;         // [sessions, heads, group, dim]
  Heads keys;            // of active rows, [sessions, heads, active, dim]
  Heads values;          // as keys
  Heads positions;       // int32 [sessions, heads, active]; EMPTY for none
  Heads mask;            // added to active rows' logits, float32 [sessions, heads, active]; no data: 0
  const Searched* stored;  // [sessions]
  int64_t rotation;      // of the layer's ranks
  int64_t rotations;     // they are rotated by less than that
  int64_t sessions, heads, group, dim, active;
  int64_t first_head, all_heads;  // of the first of these heads, among all ranks', and their number
  void* out;       // [sessions, heads, group, dim]
  float* counts;   // [sessions, heads, most], for how many rows each drawn one counts: a search alone; or none
  int32_t* drawn;  // [sessions, heads, 1 + most]: number of drawn rows, and their positions; -1 for none
  int64_t most;    // the largest `count`
  float* scratch;  // [threads, scratch_size]
  int64_t scratch_size;
  int64_t threads;
  float scale;
};

namespace {

// Position of the session's newest row: that of the query's own token.
INLINE int64_t find_newest(const Call& call, int64_t session) {
  int32_t newest = 0;
  for (int64_t head = 0; head < call.heads; ++head) {
    const int32_t* row = call.positions.at<int32_t>(session, head);
    for (int64_t i = 0; i < call.active; ++i) newest = std::max(newest, row[i] == EMPTY ? 0 : row[i]);
  }
  return newest;
}

template <typename T>
void attend_one(const Call& call, int64_t session, int64_t head, float* scratch) {
  const int64_t numbers = call.group * call.dim, index = session * call.heads + head;
  const Searched& stored = call.stored[session];
  float* queries = scratch;
  float* sums = queries + numbers;
  const T* asked = call.queries.at<T>(session, head);
  for (int64_t i = 0; i < numbers; ++i) queries[i] = widen(asked[i]) * call.scale;
  const Head<T> one{
      call.keys.at<T>(session, head),
      call.values.at<T>(session, head),
      call.positions.at<int32_t>(session, head),
      call.mask.data ? call.mask.at<float>(session, head) : nullptr,
      &stored,
      stored.ranks + (call.first_head + head) * (call.rotations / call.all_heads),
      stored.rows ? find_newest(call, session) + call.rotation : 0,
      call.rotations,
      head,
      call.active,
      call.group,
      call.dim,
      call.most,
      false,
  };
  int32_t* drawn = call.drawn + index * (1 + call.most) + 1;
  if (call.counts) {  // a search alone
    float* counts = call.counts + index * call.most;
    const int64_t made = stored.rows ? search<T>(one, queries, sums + numbers, drawn, counts) : 0;
    std::fill(drawn + made, drawn + call.most, -1);
    drawn[-1] = int32_t(made);
    return;
  }
  drawn[-1] = int32_t(attend_head<T>(one, queries, sums, drawn, sums + numbers));
  T* out = (T*)call.out + index * numbers;
  for (int64_t i = 0; i < numbers; ++i) narrow(sums[i], out + i);
}

template <typename T>
void attend(const Call& call) {
  std::atomic<int64_t> next{0};
  const int64_t heads = call.sessions * call.heads;
  auto work = [&](int64_t thread) {
    for (int64_t i = next++; i < heads; i = next++)
      attend_one<T>(call, i / call.heads, i % call.heads, call.scratch + thread * call.scratch_size);
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(size_t(call.threads));
    for (int64_t thread = 1; thread < call.threads; ++thread) helpers.emplace_back(work, thread);
  } catch (const std::exception&) {
    // The system has no more threads, or memory for them: those that there are do all.
  }
  work(0);
  for (std::thread& helper : helpers) helper.join();
}

int64_t count_scratch(const Call& call) {
  int64_t most = 0;
  for (int64_t session = 0; session < call.sessions; ++session)
    most = std::max(most, count_scratch(call.active, call.most, call.stored[session], call.group, call.dim));
  return padded(2 * call.group * call.dim + most);
}

void gather(const Gather& call) {
  for (int64_t i = 0; i < call.heads * call.count; ++i) {
    const int64_t row = call.positions[i], head = i / call.count;
    const char* page = call.pages[row / call.page_rows] + call.part;
    std::memcpy(call.out + i * call.row_bytes, page + (head * call.page_rows + row % call.page_rows) * call.row_bytes,
                size_t(call.row_bytes));
  }
}

INLINE Floats finite(Floats numbers) {  // 0 for none; the largest ones for those that are infinite
  const Floats most = Floats{} + std::numeric_limits<float>::max();
  const Floats some = (Floats)((Ints)numbers & (numbers == numbers));
  return -larger(-larger(some, -most), -most);
}

// Codes of one key, in its place of a block.
template <typename T>
INLINE void encode(const T* key, int64_t dim, float* scale, uint8_t* codes) {
  constexpr float MOST = 63;
  float numbers[LANES];
  Floats most{};
  const auto some = [&](int64_t c) {
    if (c + LANES <= dim) return finite(load(key + c));
    for (int64_t i = 0; i < LANES; ++i) numbers[i] = c + i < dim ? widen(key[c + i]) : 0;
    return finite(load(numbers));
  };
  for (int64_t c = 0; c < dim; c += LANES) most = larger(larger(some(c), -some(c)), most);
  *scale = largest(most) / MOST;
  const Floats step = Floats{} + std::max(*scale, std::numeric_limits<float>::min());
  const Floats round = Floats{} + 12582912.f;  // 1.5 * 2^23: a sum with it has no fraction
  for (int64_t c = 0; c < dim; c += LANES) {
    const Ints whole = __builtin_convertvector((some(c) / step + round) - round, Ints) + KEY_OFFSET;
    typedef uint8_t Eight __attribute__((vector_size(LANES)));
    const Eight eight = __builtin_convertvector(whole, Eight);
    for (int64_t i = c; i < std::min(dim, c + LANES); i += 4)
      std::memcpy(codes + i * LANES, (const char*)&eight + (i - c), size_t(std::min<int64_t>(4, dim - i)));
  }
}

template <typename T>
void encode(const Encode& call) {
  const int64_t block = count_quads(call.dim) * LANES * 4, rows = padded(call.page_rows);
  for (int64_t i = 0; i < call.layers * call.heads; ++i) {
    const int64_t layer = i / call.heads, head = i % call.heads;
    const T* keys = (const T*)call.rows + (layer * call.parts * call.heads + head) * call.page_rows * call.dim;
    for (int64_t row = 0; row < call.page_rows; ++row) {
      uint8_t* codes = call.codes + (i * rows / LANES + row / LANES) * block + row % LANES * 4;
      encode(keys + row * call.dim, call.dim, call.scales + i * rows + row, codes);
    }
  }
}

// Mean and variance of the members of a node: rows, or nodes that have variances of their own, behind their means.
template <bool nodes, typename T>
INLINE void summarise(const T* const members[FANOUT], int64_t dim, float* node) {
  for (int64_t c = 0; c < dim; ++c) {
    float total = 0, square = 0, within = 0;
    for (int i = 0; i < FANOUT; ++i) total += widen(members[i][c]);
    const float mean = total / FANOUT;
    for (int i = 0; i < FANOUT; ++i) {
      const float off = widen(members[i][c]) - mean;
      square += off * off;
      if (nodes) within += widen(members[i][dim + c]);
    }
    node[c] = mean;
    node[dim + c] = (square + within) / FANOUT;
  }
}

template <typename T>
void summarise(const Summarise& call) {
  const int64_t numbers = 2 * call.dim;
  for (int64_t level = 1; call.rows >> FANOUT_BITS * level; ++level) {
    const int64_t* of = call.levels + (level - 1) * 2;
    const int64_t end = call.rows >> FANOUT_BITS * level;
    for (int64_t head = 0; head < call.heads; ++head) {
      const float* below = level > 1 ? (const float*)of[-2] + head * of[-1] : nullptr;
      for (int64_t node = call.before >> FANOUT_BITS * level; node < end; ++node) {
        float* const made = (float*)of[0] + head * of[1] + node * numbers;
        const float* nodes[FANOUT];
        const T* rows[FANOUT];
        for (int64_t i = 0; i < FANOUT; ++i) {
          const int64_t at = node * FANOUT + i;
          if (level > 1) nodes[i] = below + at * numbers;
          else rows[i] = (const T*)(call.pages[at / call.page_rows] + call.keys) +
                         (head * call.page_rows + at % call.page_rows) * call.dim;
        }
        if (level > 1) summarise<true>(nodes, call.dim, made);
        else summarise<false>(rows, call.dim, made);
      }
    }
  }
}

}  // namespace

extern "C" {
// Numbers that each thread needs in `scratch`.
__attribute__((visibility("default"))) int64_t attend_scratch(const Call* call) { return count_scratch(*call); }
__attribute__((visibility("default"))) void attend_float32(const Call* call) { attend<float>(*call); }
__attribute__((visibility("default"))) void attend_bfloat16(const Call* call) { attend<uint16_t>(*call); }
// By which a program finds that this was built from other sources than its own.
__attribute__((visibility("default"))) int64_t argument_bytes() {
  return sizeof(Call) + 1000 * sizeof(Searched) + 1000000 * sizeof(Gather) + 1000000000 * int64_t(sizeof(Encode)) +
         1000000000000 * int64_t(sizeof(Summarise));
}
__attribute__((visibility("default"))) void summarise_float32(const Summarise* call) { summarise<float>(*call); }
__attribute__((visibility("default"))) void summarise_bfloat16(const Summarise* call) { summarise<uint16_t>(*call); }
__attribute__((visibility("default"))) void encode_float32(const Encode* call) { encode<float>(*call); }
__attribute__((visibility("default"))) void encode_bfloat16(const Encode* call) { encode<uint16_t>(*call); }
__attribute__((visibility("default"))) void gather_rows(const Gather* call) { gather(*call); }
}
