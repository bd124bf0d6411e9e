// Attention of a decode step with retrieval: one call for a layer, with all of its sessions and heads.
//
// Logits of every stored key, softmax weights, priority sampling, and attention over active and drawn
// rows in one softmax. Keys are read once, from the pages that the row store has them in; of drawn rows,
// values alone are read again. What is drawn is defined by workers/retrieval/sampling.py, whose results these are.
//
// Vectors are the compiler's (GCC, Clang) and no instruction set's: the same source is compiled for several
// (setup.py), and library.py loads the one that the CPU has. A head is computed by one thread in one
// order, so that results depend neither on the number of threads nor on the other sessions.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))

// Of one session, as `Searched` of searched.py.
struct Searched {
  const char* const* pages;  // [rows / page_rows, rounded up]
  int64_t keys;              // bytes from a page to those of the layer, [heads, page_rows, dim]
  int64_t values;            // as keys
  const float* ranks;        // of all positions, and of those that a rotation adds
  int64_t page_rows;         // rows of a head in a page
  int64_t rows;              // that can be drawn; 0: none
  int64_t count;             // that are drawn at most

  // Row of a head; `part`: `keys` or `values`.
  template <typename T>
  const T* at(int64_t part, int64_t head, int64_t row, int64_t dim) const {
    return (const T*)(pages[row / page_rows] + part) + (head * page_rows + row % page_rows) * dim;
  }
};

// Rows of a head that are copied, as `Gather` of gather.py.
struct Gather {
  const char* const* pages;  // as those of `Searched`
  int64_t part;              // bytes from a page to [heads, page_rows, row_bytes]
  int64_t page_rows, row_bytes;
  int64_t heads, count;
  const int64_t* positions;  // [heads, count]
  char* out;                 // [heads, count, row_bytes]
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

constexpr int64_t LANES = 8;
constexpr int64_t TILE_BYTES = 16384;  // keys that stay in the first cache for all queries of a group
constexpr int64_t LINE = 64;           // bytes that are fetched at once
constexpr int32_t EMPTY = std::numeric_limits<int32_t>::max();
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE float widen(float number) { return number; }

INLINE float widen(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE void narrow(float number, float* into) { *into = number; }

INLINE void narrow(float number, uint16_t* into) {  // to the nearest bfloat16, of two to the even one
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  *into = number != number ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE Floats load(const float* from) {
  Floats loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

INLINE Floats load(const uint16_t* from) {
  Halves loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return (Floats)(__builtin_convertvector(loaded, Ints) << 16);
}

INLINE void store(Floats numbers, float* into) { std::memcpy(into, &numbers, sizeof numbers); }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Sums of the lanes of four vectors.
INLINE Quad sum(Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const Floats cd = SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const Floats halves = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  Quad both[2];
  std::memcpy(both, &halves, sizeof both);
  return both[0] + both[1];
}

INLINE float sum(Floats lanes) { return sum(lanes, lanes, lanes, lanes)[0]; }

INLINE float largest(Floats lanes) {
  float most = lanes[0];
  for (int64_t lane = 1; lane < LANES; ++lane) most = std::max(most, lanes[lane]);
  return most;
}

INLINE bool any(Ints lanes) {
  int64_t words[sizeof lanes / sizeof(int64_t)];
  std::memcpy(words, &lanes, sizeof lanes);
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

// exp of numbers up to 0, to two units in the last place; 0 where it is no normal number.
INLINE Floats exponential(Floats x) {
  const Floats round = Floats{} + 12582912.f;  // 1.5 * 2^23: a sum with it has no fraction
  const Ints normal = x >= Floats{} - 87.3f;
  x = (Floats)((Ints)x & normal);
  const Floats whole = (x * 1.44269504f + round) - round;
  const Floats part = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats power = part * 1.9875691500e-4f + 1.3981999507e-3f;
  power = power * part + 8.3334519073e-3f;
  power = power * part + 4.1665795894e-2f;
  power = power * part + 1.6666665459e-1f;
  power = power * part + 5.0000001201e-1f;
  power = power * part * part + part + 1.f;
  const Ints scale = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return (Floats)((Ints)(power * (Floats)scale) & normal);
}

// Sum in parts, so that it is exact to the last places of a float however long it is.
template <typename Term>
INLINE double sum_terms(int64_t n, Term term) {
  double total = 0;
  for (int64_t first = 0; first < n; first += 512) {
    Floats part{};
    const int64_t stop = std::min(n, first + 512);
    for (int64_t i = first; i < stop; i += LANES) part += term(i);
    total += sum(part);
  }
  return total;
}

// Powers of e by logits [padded], as far below the largest as they are; returns their sum.
INLINE double exponentiate(const float* logits, int64_t n, float* powers) {
  Floats most = load(logits);
  for (int64_t i = LANES; i < n; i += LANES) {
    const Floats next = load(logits + i);
    most = (Floats)(((Ints)next & (next > most)) | ((Ints)most & (next <= most)));
  }
  const Floats top = Floats{} + largest(most);
  return sum_terms(n, [&](int64_t i) {
    const Floats power = exponential(load(logits + i) - top);
    store(power, powers + i);
    return power;
  });
}

// Logits of four rows for Q queries.
template <int Q, typename T>
INLINE void score_rows(const T* const rows[4], int64_t dim, const float* queries, float* logits, int64_t stride) {
  Floats sums[Q][4] = {};
  const int64_t whole = dim / LANES * LANES;
  for (int64_t c = 0; c < whole; c += LANES) {
    const Floats keys[4] = {load(rows[0] + c), load(rows[1] + c), load(rows[2] + c), load(rows[3] + c)};
#pragma GCC unroll 3
    for (int q = 0; q < Q; ++q) {
      const Floats query = load(queries + q * dim + c);
      for (int r = 0; r < 4; ++r) sums[q][r] += keys[r] * query;
    }
  }
#pragma GCC unroll 3
  for (int q = 0; q < Q; ++q) {  // unrolled, so that sums stay in registers
    Quad four = sum(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
    for (int64_t c = whole; c < dim; ++c)
      four += Quad{widen(rows[0][c]), widen(rows[1][c]), widen(rows[2][c]), widen(rows[3][c])} * queries[q * dim + c];
    std::memcpy(logits + q * stride, &four, sizeof four);
  }
}

// Fetches numbers that lie one after the other, into the first cache or, `later`, into the second one.
template <bool later, typename T>
INLINE void fetch(const T* from, int64_t numbers) {
  for (int64_t c = 0; c < numbers; c += LINE / int64_t(sizeof(T))) __builtin_prefetch(from + c, 0, later ? 2 : 3);
}

template <int Q, typename T>
INLINE void score_tile(const T* keys, int64_t n, int64_t dim, const float* queries, float* logits, int64_t stride,
                       const T* next) {
  for (int64_t i = 0; i < n; i += 4) {
    const T* rows[4];  // behind the end the last one's, whose logits are overwritten
    for (int64_t r = 0; r < 4; ++r) rows[r] = keys + std::min(i + r, n - 1) * dim;
    if (next) fetch<true>(next + i * dim, 4 * dim);
    score_rows<Q>(rows, dim, queries, logits + i, stride);
  }
}

// Logits [group, stride] of keys [n, dim]. `next`: what is read after them. A tile is fetched while the one
// before it is scored: pages lie anywhere, and no CPU guesses where the next one is.
template <typename T>
INLINE void score(const T* keys, int64_t n, int64_t dim, const float* queries, int64_t group, float* logits,
                  int64_t stride, const T* next) {
  const int64_t tile = std::max<int64_t>(1, TILE_BYTES / (dim * int64_t(sizeof(T)) * 4)) * 4;
  for (int64_t first = 0; first < n; first += tile) {
    const T* some = keys + first * dim;
    const int64_t rows = std::min(tile, n - first);
    const T* ahead = first + rows < n ? some + rows * dim : next;
    for (int64_t q = 0; q < group;) {
      const float* asked = queries + q * dim;
      float* into = logits + q * stride + first;
      const T* fetched = q == 0 ? ahead : nullptr;
      switch (group - q) {  // three at once at most: their sums have to stay in registers
        case 1: score_tile<1>(some, rows, dim, asked, into, stride, fetched); q += 1; break;
        case 2:
        case 4: score_tile<2>(some, rows, dim, asked, into, stride, fetched); q += 2; break;
        default: score_tile<3>(some, rows, dim, asked, into, stride, fetched); q += 3;
      }
    }
  }
}

// Sets the places behind the first n of logits [group, stride] to -inf; stride: a multiple of LANES.
INLINE void close_rows(float* logits, int64_t n, int64_t group, int64_t stride) {
  for (int64_t q = 0; q < group; ++q) std::fill(logits + q * stride + n, logits + (q + 1) * stride, NONE);
}

// Each row's share of the softmax, the mean over the queries of a group.
INLINE void weigh(const float* logits, int64_t group, int64_t stride, float* powers, float* weights) {
  std::fill(weights, weights + stride, 0.f);
  for (int64_t q = 0; q < group; ++q) {
    const double total = exponentiate(logits + q * stride, stride, powers);
    const Floats share = Floats{} + float(1 / (total * double(group)));
    for (int64_t i = 0; i < stride; i += LANES) store(load(weights + i) + load(powers + i) * share, weights + i);
  }
}

// Number at place `count` of the descending order, from 0; 0 if that is negative. By bisection over the bits,
// whose order as whole numbers is that of the numbers.
INLINE float find_threshold(const float* numbers, int64_t n, int64_t count) {
  int32_t low = -1, high = 0x7f800000;  // not more than `count` are over `high`
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const Ints bound = Ints{} + middle;
    Ints counted{};
    for (int64_t i = 0; i < n; i += LANES) counted -= (Ints)load(numbers + i) > bound;
    int64_t over = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) over += counted[lane];
    if (over > count) {
      low = middle;
      continue;
    }
    high = middle;
    if (over < count) continue;
    Ints most{};  // the largest that is not over
    for (int64_t i = 0; i < n; i += LANES) {
      const Ints bits = (Ints)load(numbers + i);
      const Ints taken = (bits <= bound) & (bits > most);
      most = (bits & taken) | (most & ~taken);
    }
    high = most[0];
    for (int64_t lane = 1; lane < LANES; ++lane) high = std::max(high, most[lane]);
    break;
  }
  float found;
  std::memcpy(&found, &high, sizeof found);
  return found;
}

// Positions, in their order, whose priority is over the threshold, and of those at it as many as there is room for.
INLINE int64_t collect(const float* priorities, int64_t n, float threshold, int64_t count, int32_t* drawn) {
  int64_t made = 0;
  const Floats bound = Floats{} + threshold;
  for (int64_t first = 0; first < n; first += LANES) {
    if (!any(load(priorities + first) > bound)) continue;
    for (int64_t i = first; i < first + LANES && made < count; ++i)
      if (priorities[i] > threshold) drawn[made++] = int32_t(i);
  }
  for (int64_t i = 0; i < n && made < count && threshold > 0; ++i)
    if (priorities[i] == threshold) drawn[made++] = int32_t(i);
  return made;
}

// Draws rows of weights [padded], negative for no candidate: `draw` of sampling.py, and `take_best` of no more
// rows than `count`. Sets positions, and for how many rows each one counts; returns how many there are.
INLINE int64_t draw(const float* weights, const float* priorities, int64_t rows, int64_t count, int32_t* drawn,
                    float* counts) {
  int64_t made = 0;
  if (rows <= count) {
    for (int64_t i = 0; i < rows; ++i)
      if (weights[i] >= 0) drawn[made++] = int32_t(i);
    std::fill(counts, counts + made, 1.f);
    return made;
  }
  const int64_t n = padded(rows);
  const float next = find_threshold(priorities, n, count);
  made = collect(priorities, n, next, count, drawn);
  const float threshold = std::max(next, std::numeric_limits<float>::min());
  const Floats bound = Floats{} + threshold;
  double rest = sum_terms(n, [&](int64_t i) {
    const Floats some = load(weights + i);
    return (Floats)((Ints)some & (some < bound) & (some > Floats{}));
  });
  // One drawn row at least, that of the least priority, is not certain.
  int64_t last = -1;
  for (int64_t j = 0; j < made && made == count; ++j)
    if (last < 0 || priorities[drawn[j]] < priorities[drawn[last]]) last = j;
  int64_t certain = 0;
  for (int64_t j = 0; j < made; ++j) certain += weights[drawn[j]] >= threshold && j != last;
  if (last >= 0 && weights[drawn[last]] >= threshold) rest += weights[drawn[last]];
  const double share = rest / double(std::max<int64_t>(1, made - certain));
  for (int64_t j = 0; j < made; ++j) {
    const float weight = weights[drawn[j]];
    counts[j] = weight >= threshold && j != last ? 1.f : float(share / weight);
  }
  return made;
}

// Position of the session's newest row: that of the query's own token.
INLINE int64_t find_newest(const Call& call, int64_t session) {
  int32_t newest = 0;
  for (int64_t head = 0; head < call.heads; ++head) {
    const int32_t* row = call.positions.at<int32_t>(session, head);
    for (int64_t i = 0; i < call.active; ++i) newest = std::max(newest, row[i] == EMPTY ? 0 : row[i]);
  }
  return newest;
}

// Searches the stored rows of a head, of which those that are active cannot be drawn.
template <typename T>
INLINE int64_t search(const Call& call, int64_t session, int64_t head, const float* queries, float* logits,
                      int32_t* drawn, float* counts) {
  const Searched& stored = call.stored[session];
  const int64_t stride = padded(stored.rows);
  float* weights = logits + call.group * stride;
  float* priorities = weights + stride;
  for (int64_t first = 0, after; first < stored.rows; first = after) {
    after = std::min(stored.rows, first + stored.page_rows);
    const T* next = after < stored.rows ? stored.at<T>(stored.keys, head, after, call.dim) : nullptr;
    const T* keys = stored.at<T>(stored.keys, head, first, call.dim);
    score(keys, after - first, call.dim, queries, call.group, logits + first, stride, next);
  }
  close_rows(logits, stored.rows, call.group, stride);
  weigh(logits, call.group, stride, priorities, weights);
  const int32_t* active = call.positions.at<int32_t>(session, head);
  for (int64_t i = 0; i < call.active; ++i)
    if (active[i] < stored.rows) weights[active[i]] = -1.f;
  const int64_t rotation = (find_newest(call, session) + call.rotation) % call.rotations;
  const float* ranks = stored.ranks + rotation + head * (call.rotations / call.heads);
  for (int64_t i = 0; i < stride; i += LANES) store(load(weights + i) * load(ranks + i), priorities + i);
  return draw(weights, priorities, stored.rows, stored.count, drawn, counts);
}

template <typename T>
INLINE void add_row(const T* values, int64_t dim, int64_t group, const float* weights, int64_t stride, float* sums) {
  const int64_t whole = dim / LANES * LANES;
  for (int64_t q = 0; q < group; ++q) {
    const float weight = weights[q * stride];
    float* into = sums + q * dim;
    for (int64_t c = 0; c < whole; c += LANES) store(load(into + c) + load(values + c) * weight, into + c);
    for (int64_t c = whole; c < dim; ++c) into[c] += widen(values[c]) * weight;
  }
}

// One KV head of one session. Scratch: queries, sums, counts, logits of both kinds of rows, then what `search` needs.
template <typename T>
void attend_head(const Call& call, int64_t session, int64_t head, float* scratch) {
  const int64_t group = call.group, dim = call.dim, active = call.active;
  const int64_t index = session * call.heads + head, numbers = group * dim;
  const Searched& stored = call.stored[session];
  float* queries = scratch;
  float* sums = queries + numbers;
  float* counts = sums + numbers;
  float* joint = counts + call.most;
  const int64_t most = padded(active + call.most);
  float* logits = joint + group * most;
  const T* asked = call.queries.at<T>(session, head);
  for (int64_t i = 0; i < numbers; ++i) queries[i] = widen(asked[i]) * call.scale;
  int32_t* drawn = call.drawn + index * (1 + call.most) + 1;
  const int64_t made = stored.rows ? search<T>(call, session, head, queries, logits, drawn, counts) : 0;
  std::fill(drawn + made, drawn + call.most, -1);
  drawn[-1] = int32_t(made);
  if (call.counts) {
    std::copy(counts, counts + made, call.counts + index * call.most);
    return;
  }
  const T* values = call.values.at<T>(session, head);
  score<T>(call.keys.at<T>(session, head), active, dim, queries, group, joint, most, nullptr);
  close_rows(joint, active, group, most);
  const float* mask = call.mask.data ? call.mask.at<float>(session, head) : nullptr;
  std::fill(sums, sums + numbers, 0.f);
  for (int64_t q = 0; q < group; ++q) {
    float* row = joint + q * most;
    for (int64_t i = 0; mask && i < active; ++i) row[i] += mask[i];
    for (int64_t j = 0; j < made; ++j) row[active + j] = logits[q * padded(stored.rows) + drawn[j]];
    double total = exponentiate(row, most, row);
    for (int64_t j = 0; j < made; ++j) {
      const float counted = row[active + j] * counts[j];
      total += counted - row[active + j];
      row[active + j] = counted;
    }
    const float share = float(1 / total);
    for (int64_t i = 0; i < most; ++i) row[i] *= share;
  }
  for (int64_t i = 0; i < active; ++i) add_row(values + i * dim, dim, group, joint + i, most, sums);
  for (int64_t j = 0; j < made; ++j) {
    if (j + 8 < made) fetch<false>(stored.at<T>(stored.values, head, drawn[j + 8], dim), dim);
    add_row(stored.at<T>(stored.values, head, drawn[j], dim), dim, group, joint + active + j, most, sums);
  }
  T* out = (T*)call.out + index * numbers;
  for (int64_t i = 0; i < numbers; ++i) narrow(sums[i], out + i);
}

template <typename T>
void attend(const Call& call) {
  std::atomic<int64_t> next{0};
  const int64_t heads = call.sessions * call.heads;
  auto work = [&](int64_t thread) {
    for (int64_t i = next++; i < heads; i = next++)
      attend_head<T>(call, i / call.heads, i % call.heads, call.scratch + thread * call.scratch_size);
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

void gather(const Gather& call) {
  for (int64_t i = 0; i < call.heads * call.count; ++i) {
    const int64_t row = call.positions[i], head = i / call.count;
    const char* page = call.pages[row / call.page_rows] + call.part;
    std::memcpy(call.out + i * call.row_bytes, page + (head * call.page_rows + row % call.page_rows) * call.row_bytes,
                size_t(call.row_bytes));
  }
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) void attend_float32(const Call* call) { attend<float>(*call); }
__attribute__((visibility("default"))) void attend_bfloat16(const Call* call) { attend<uint16_t>(*call); }
__attribute__((visibility("default"))) void gather_rows(const Gather* call) { gather(*call); }
}
