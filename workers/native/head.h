// Attention of one KV head of one session to its active rows, and to stored ones that it draws.
//
// Logits of the codes of every stored key, softmax weights, priority sampling, and attention over active and drawn
// rows in one softmax. Codes (kvstore/index/key_codes.py) are read by all queries of a head at once; of drawn rows
// keys and values are read from the pages that the row store has them in. What is drawn is defined by
// workers/retrieval/sampling.py, whose results these are.
//
// A head is computed by one thread in one order, so that results depend neither on the number of threads
// nor on the other sessions.
#pragma once

#include "vectors.h"

namespace {

constexpr int32_t KEY_OFFSET = 64;  // is added to a key's codes, which are bytes without a sign: as in key_codes.py

INLINE int64_t count_quads(int64_t dim) { return (dim + 3) / 4; }

}  // namespace

// Of one session, as `Searched` of searched.py.
struct Searched {
  const char* const* pages;  // [rows / page_rows, rounded up]
  int64_t keys;              // bytes from a page to those of the layer, [heads, page_rows, dim]
  int64_t values;            // as keys
  const char* const* codes;  // of the pages' keys
  int64_t scales;            // bytes from a page's codes to the layer's scales, float32 [heads, padded page_rows]
  int64_t coded;             // as scales, to its codes, [heads, padded page_rows / 8, dim / 4 rounded up, 8, 4]
  const float* ranks;        // of all positions, and of those that a rotation adds
  int64_t page_rows;         // rows of a head in a page
  int64_t rows;              // that can be drawn; 0: none
  int64_t count;             // that are drawn at most
  const int64_t* starts;     // first rows of segments, ascending from 0
  const int64_t* shifts;     // is added to the positions that a segment's rows were computed at, to where they are seen
  int64_t segments;          // 0: all rows are seen where they were computed
  const float* turned;       // queries to the rows of each segment, scaled: [group, dim], in steps of so many numbers
  int64_t segment_step, head_step;

  // Row of a head; `part`: `keys` or `values`.
  template <typename T>
  const T* at(int64_t part, int64_t head, int64_t row, int64_t dim) const {
    return (const T*)(pages[row / page_rows] + part) + (head * page_rows + row % page_rows) * dim;
  }
  // Codes of a head in the page of a row.
  const uint8_t* codes_at(int64_t head, int64_t row, int64_t dim) const {
    return (const uint8_t*)codes[row / page_rows] + coded + head * padded(page_rows) * count_quads(dim) * 4;
  }
  const float* scales_at(int64_t head, int64_t row) const {
    return (const float*)(codes[row / page_rows] + scales) + head * padded(page_rows);
  }
};

namespace {

constexpr int64_t TILE_BYTES = 16384;  // keys that stay in the first cache for all queries of a group
constexpr int32_t EMPTY = std::numeric_limits<int32_t>::max();

// What the queries of a head attend to.
template <typename T>
struct Head {
  const T* keys;             // of active rows, [active, dim]
  const T* values;           // as keys
  const int32_t* positions;  // [active]; EMPTY for none
  const float* mask;         // added to active rows' logits, [active]; none: 0
  const Searched* stored;
  const float* ranks;  // of the stored rows' positions
  int64_t index;       // of the head in the session
  int64_t active, group, dim;
  int64_t most;  // rows that are drawn at most
  bool turns;    // active keys are as they were computed, and seen by segments as stored ones
};

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

template <int Q, typename T>
INLINE void score_tile(const T* keys, int64_t n, int64_t dim, const float* queries, float* logits, int64_t stride) {
  for (int64_t i = 0; i < n; i += 4) {
    const T* rows[4];  // behind the end the last one's, whose logits are overwritten
    for (int64_t r = 0; r < 4; ++r) rows[r] = keys + std::min(i + r, n - 1) * dim;
    score_rows<Q>(rows, dim, queries, logits + i, stride);
  }
}

// Logits [group, stride] of keys [n, dim].
template <typename T>
INLINE void score(const T* keys, int64_t n, int64_t dim, const float* queries, int64_t group, float* logits,
                  int64_t stride) {
  const int64_t tile = std::max<int64_t>(1, TILE_BYTES / (dim * int64_t(sizeof(T)) * 4)) * 4;
  for (int64_t first = 0; first < n; first += tile) {
    const T* some = keys + first * dim;
    const int64_t rows = std::min(tile, n - first);
    for (int64_t q = 0; q < group;) {
      const float* asked = queries + q * dim;
      float* into = logits + q * stride + first;
      switch (group - q) {  // three at once at most: their sums have to stay in registers
        case 1: score_tile<1>(some, rows, dim, asked, into, stride); q += 1; break;
        case 2:
        case 4: score_tile<2>(some, rows, dim, asked, into, stride); q += 2; break;
        default: score_tile<3>(some, rows, dim, asked, into, stride); q += 3;
      }
    }
  }
}

// Queries of a head as codes, beside those of the keys: `encode_queries` of kvstore/index/key_codes.py.
struct Asked {
  const int32_t* quads;  // four codes in each, [group, quads]
  const float* scales;   // [group]
  const int32_t* sums;   // of a query's codes, times what is added to each of a key's, [group]
};

// Encodes queries [group, dim] into memory of `count_asked` numbers.
INLINE Asked encode_queries(const float* queries, int64_t group, int64_t dim, float* memory) {
  const int64_t quads = count_quads(dim);
  float* scales = memory;
  int32_t* sums = (int32_t*)(scales + group);
  int8_t* codes = (int8_t*)(sums + group);
  std::memset(codes, 0, size_t(group * quads * 4));
  for (int64_t q = 0; q < group; ++q) {
    const float* query = queries + q * dim;
    float most = 0;
    for (int64_t c = 0; c < dim; ++c) most = std::max(most, std::fabs(query[c]));
    scales[q] = most / 127;
    sums[q] = 0;
    const float step = std::max(scales[q], std::numeric_limits<float>::min());
    for (int64_t c = 0; c < dim; ++c) {
      const int32_t code = int32_t(std::nearbyint(query[c] / step));
      codes[q * quads * 4 + c] = int8_t(code);
      sums[q] += KEY_OFFSET * code;
    }
  }
  return {(const int32_t*)codes, scales, sums};
}

INLINE int64_t count_asked(int64_t group, int64_t dim) { return padded(group * (2 + count_quads(dim))); }

// Logits of the codes of n rows for Q queries from `first` on.
template <int Q>
INLINE void score_codes(const uint8_t* codes, const float* scales, int64_t n, int64_t quads, const Asked& asked,
                        int64_t first, float* logits, int64_t stride) {
  for (int64_t i = 0; i < n; i += LANES, codes += quads * sizeof(Bytes)) {
    Ints sums[Q] = {};
    for (int64_t c = 0; c < quads; ++c) {
      Bytes some;
      std::memcpy(&some, codes + c * int64_t(sizeof some), sizeof some);
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) sums[q] = add_products(sums[q], some, asked.quads[(first + q) * quads + c]);
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
      const Floats whole = __builtin_convertvector(sums[q] - asked.sums[first + q], Floats);
      const Floats four = whole * load(scales + i) * asked.scales[first + q];
      float* into = logits + (first + q) * stride + i;
      if (i + LANES <= n) store(four, into);
      else std::memcpy(into, &four, size_t(n - i) * sizeof(float));
    }
  }
}

// Consecutive rows, and the queries that ask them.
struct Segment {
  int64_t first, last;
  const float* queries;  // [group, dim]
};

INLINE int64_t count_segments(const Searched& stored) { return std::max<int64_t>(1, stored.segments); }

// Segment of a head's rows; `queries`: to all rows, where there are no segments.
template <typename T>
INLINE Segment get_segment(const Head<T>& head, int64_t index, const float* queries) {
  const Searched& stored = *head.stored;
  constexpr int64_t END = std::numeric_limits<int64_t>::max();
  if (!stored.segments) return {0, END, queries};
  return {stored.starts[index], index + 1 < stored.segments ? stored.starts[index + 1] : END,
          stored.turned + index * stored.segment_step + head.index * stored.head_step};
}

// Logits [group, stride] of the codes of the stored rows from `first` to `last`, and of some of those just before. A
// page's codes are fetched while those of the one before it are scored: pages lie anywhere, and no CPU guesses where
// the next one is.
INLINE void score_stored(const Searched& stored, int64_t first, int64_t last, int64_t head, int64_t dim, int64_t group,
                         const Asked& asked, float* logits, int64_t stride) {
  const int64_t quads = count_quads(dim);
  for (int64_t at = first, after; at < last; at = after) {
    const int64_t page = at / stored.page_rows * stored.page_rows, skipped = (at - page) / LANES * LANES;
    after = std::min(last, page + stored.page_rows);
    const uint8_t* codes = stored.codes_at(head, at, dim) + skipped * quads * 4;
    const float* scales = stored.scales_at(head, at) + skipped;
    if (after < last) fetch<true>(stored.codes_at(head, after, dim), padded(stored.page_rows) * quads * 4);
    const int64_t n = after - page - skipped;
    float* into = logits + page + skipped;
    for (int64_t q = 0; q < group;) {
      switch (group - q) {
        case 1: score_codes<1>(codes, scales, n, quads, asked, q, into, stride); q += 1; break;
        case 2: score_codes<2>(codes, scales, n, quads, asked, q, into, stride); q += 2; break;
        case 3: score_codes<3>(codes, scales, n, quads, asked, q, into, stride); q += 3; break;
        default: score_codes<4>(codes, scales, n, quads, asked, q, into, stride); q += 4;
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
INLINE float bisect(const float* numbers, int64_t n, int64_t count) {
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

// As `bisect`, of many numbers. That of the largest of each few is a lower bound; over it are only numbers of so few as are
// over it themselves. `memory`: of n numbers.
INLINE float find_threshold(const float* numbers, int64_t n, int64_t count, float* memory) {
  constexpr int64_t FEW = 8;
  const int64_t step = FEW * LANES, most = n / 2;
  if (n < step || n < 2 * FEW * (count + 1)) return bisect(numbers, n, count);
  float* largest = memory;
  int64_t vectors = 0;
  for (int64_t first = 0; first < n; first += step, ++vectors) {
    Floats few = load(numbers + first);
    for (int64_t i = first + LANES; i < std::min(n, first + step); i += LANES) few = larger(load(numbers + i), few);
    store(few, largest + vectors * LANES);
  }
  const float bound = bisect(largest, vectors * LANES, count);
  if (bound <= 0) return bisect(numbers, n, count);
  float* over = largest + vectors * LANES;
  int64_t made = 0;
  for (int64_t i = 0; i < vectors * LANES; ++i) {
    if (largest[i] < bound) continue;
    const int64_t first = i / LANES * step + i % LANES;
    if (made + FEW > most) return bisect(numbers, n, count);
    for (int64_t j = first; j < std::min(n, first + step); j += LANES)
      if (numbers[j] >= bound) over[made++] = numbers[j];
  }
  std::fill(over + made, over + padded(made), -1.f);
  return bisect(over, padded(made), count);
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
// rows than `count`. Sets positions, and for how many rows each one counts; returns how many there are. `memory`: of
// so many numbers as weights.
INLINE int64_t draw(const float* weights, const float* priorities, int64_t rows, int64_t count, int32_t* drawn,
                    float* counts, float* memory) {
  int64_t made = 0;
  if (rows <= count) {
    for (int64_t i = 0; i < rows; ++i)
      if (weights[i] >= 0) drawn[made++] = int32_t(i);
    std::fill(counts, counts + made, 1.f);
    return made;
  }
  const int64_t n = padded(rows);
  const float next = find_threshold(priorities, n, count, memory);
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

// Draws of the stored rows for queries [group, dim], none that is active. Sets positions and counts of drawn ones;
// returns how many they are. `logits`: scratch of group + 2 times the padded rows, and of `count_asked`.
template <typename T>
INLINE int64_t search(const Head<T>& head, const float* queries, float* logits, int32_t* drawn, float* counts) {
  const Searched& stored = *head.stored;
  const int64_t stride = padded(stored.rows);
  float* weights = logits + head.group * stride;
  float* priorities = weights + stride;
  for (int64_t index = count_segments(stored) - 1; index >= 0; --index) {  // each sets some logits of the one before
    const Segment some = get_segment(head, index, queries);
    if (some.first >= stored.rows) continue;
    const Asked asked = encode_queries(some.queries, head.group, head.dim, priorities + stride);
    score_stored(stored, some.first, std::min(some.last, stored.rows), head.index, head.dim, head.group, asked, logits,
                 stride);
  }
  close_rows(logits, stored.rows, head.group, stride);
  weigh(logits, head.group, stride, priorities, weights);
  for (int64_t i = 0; i < head.active; ++i)
    if (head.positions[i] < stored.rows) weights[head.positions[i]] = -1.f;
  for (int64_t i = 0; i < stride; i += LANES) store(load(weights + i) * load(head.ranks + i), priorities + i);
  return draw(weights, priorities, stored.rows, stored.count, drawn, counts, logits);
}

// Logits [group, stride] of n rows that lie anywhere; `key(j)`, `position(j)`: of one.
template <typename T, typename Key, typename Position>
INLINE void score_apart(const Head<T>& head, int64_t n, Key key, Position position, const float* queries, float* logits,
                        int64_t stride) {
  Segment some{};
  const auto is_in = [&](int64_t j) { return position(j) >= some.first && position(j) < some.last; };
  for (int64_t j = 0, after; j < n; j = after) {
    for (int64_t index = 0; !is_in(j); ++index) some = get_segment(head, index, queries);
    for (after = j + 1; after < std::min(n, j + 4) && is_in(after);) ++after;
    const T* rows[4];
    for (int64_t r = 0; r < 4; ++r) {
      rows[r] = key(std::min(j + r, after - 1));
      fetch<false>(key(std::min(j + r + 8, n - 1)), head.dim);
    }
    for (int64_t q = 0, asked; q < head.group; q += asked) {
      const float* query = some.queries + q * head.dim;
      float four[3][4];
      switch (head.group - q) {  // as in `score`
        case 1: score_rows<1>(rows, head.dim, query, *four, 4); asked = 1; break;
        case 2:
        case 4: score_rows<2>(rows, head.dim, query, *four, 4); asked = 2; break;
        default: score_rows<3>(rows, head.dim, query, *four, 4); asked = 3;
      }
      for (int64_t i = 0; i < asked; ++i) std::copy(four[i], four[i] + (after - j), logits + (q + i) * stride + j);
    }
  }
}

// Logits [group, stride] of the keys of drawn rows.
template <typename T>
INLINE void score_drawn(const Head<T>& head, const int32_t* drawn, int64_t made, const float* queries, float* logits,
                        int64_t stride) {
  const Searched& stored = *head.stored;
  score_apart(
      head, made, [&](int64_t j) { return stored.at<T>(stored.keys, head.index, drawn[j], head.dim); },
      [&](int64_t j) { return drawn[j]; }, queries, logits, stride);
}

// Logits [group, stride] of the keys of active rows.
template <typename T>
INLINE void score_active(const Head<T>& head, const float* queries, float* logits, int64_t stride) {
  if (!head.turns) return score(head.keys, head.active, head.dim, queries, head.group, logits, stride);
  score_apart(
      head, head.active, [&](int64_t j) { return head.keys + j * head.dim; },
      [&](int64_t j) { return head.positions[j]; }, queries, logits, stride);
}

// Adds N rows of values, each times its weight, to sums [group, dim].
template <int N, typename T>
INLINE void add_rows(const T* const rows[N], int64_t dim, int64_t group, const float* weights, int64_t stride,
                     float* sums) {
  const int64_t whole = dim / LANES * LANES;
  for (int64_t q = 0; q < group; ++q) {
    const float* weight = weights + q * stride;
    float* into = sums + q * dim;
    for (int64_t c = 0; c < whole; c += LANES) {
      Floats sum = load(into + c);
#pragma GCC unroll 4
      for (int r = 0; r < N; ++r) sum += load(rows[r] + c) * weight[r];
      store(sum, into + c);
    }
    for (int64_t c = whole; c < dim; ++c)
      for (int r = 0; r < N; ++r) into[c] += widen(rows[r][c]) * weight[r];
  }
}

// Adds the first `left` of four rows; in the same order, whether they are four or fewer.
template <typename T>
INLINE void add_some(const T* const rows[4], int64_t left, int64_t dim, int64_t group, const float* weights,
                     int64_t stride, float* sums) {
  if (left >= 4) return add_rows<4>(rows, dim, group, weights, stride, sums);
  for (int64_t r = 0; r < left; ++r) add_rows<1>(rows + r, dim, group, weights + r, stride, sums);
}

// Numbers of scratch that `attend_head` needs for so many rows.
INLINE int64_t count_scratch(int64_t active, int64_t most, int64_t stored, int64_t group, int64_t dim) {
  return most + group * padded(active + most) + (group + 2) * padded(stored) + count_asked(group, dim);
}

// Attends with queries [group, dim], which are scaled, into sums of that shape. Sets positions of the `most` drawn
// rows, -1 for none, and returns how many there are.
template <typename T>
int64_t attend_head(const Head<T>& head, const float* queries, float* sums, int32_t* drawn, float* scratch) {
  const int64_t group = head.group, dim = head.dim, active = head.active;
  const Searched& stored = *head.stored;
  float* counts = scratch;
  float* joint = counts + head.most;
  const int64_t most = padded(active + head.most);
  float* logits = joint + group * most;
  const int64_t made = stored.rows ? search<T>(head, queries, logits, drawn, counts) : 0;
  const int64_t width = padded(made);
  score_drawn(head, drawn, made, queries, logits, width);
  std::fill(drawn + made, drawn + head.most, -1);
  score_active(head, queries, joint, most);
  close_rows(joint, active, group, most);
  std::fill(sums, sums + group * dim, 0.f);
  for (int64_t q = 0; q < group; ++q) {
    float* row = joint + q * most;
    for (int64_t i = 0; head.mask && i < active; ++i) row[i] += head.mask[i];
    for (int64_t j = 0; j < made; ++j) row[active + j] = logits[q * width + j];
    double total = exponentiate(row, most, row);
    for (int64_t j = 0; j < made; ++j) {
      const float counted = row[active + j] * counts[j];
      total += counted - row[active + j];
      row[active + j] = counted;
    }
    const float share = float(1 / total);
    for (int64_t i = 0; i < most; ++i) row[i] *= share;
  }
  for (int64_t i = 0; i < active; i += 4) {
    const T* rows[4];
    for (int64_t r = 0; r < 4; ++r) rows[r] = head.values + std::min(i + r, active - 1) * dim;
    add_some(rows, active - i, dim, group, joint + i, most, sums);
  }
  const auto value = [&](int64_t j) {
    return stored.at<T>(stored.values, head.index, drawn[std::min(j, made - 1)], dim);
  };
  for (int64_t j = 0; j < made; j += 4) {
    const T* rows[4];
    for (int64_t r = 0; r < 4; ++r) {
      rows[r] = value(j + r);
      fetch<false>(value(j + r + 8), dim);
    }
    add_some(rows, made - j, dim, group, joint + active + j, most, sums);
  }
  return made;
}

}  // namespace
