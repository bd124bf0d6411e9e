// A layer's stored rows of a session, and scores of keys.
#pragma once

#include "vectors.h"

namespace {

constexpr int FANOUT_BITS = 3;
constexpr int FANOUT = 1 << FANOUT_BITS;  // nodes of the level below, or rows, that a node has: as in summaries.py

INLINE int64_t count_quads(int64_t dim) { return (dim + 3) / 4; }

}  // namespace

// Of one session, as `Searched` of searched.py.
struct Searched {
  const char* const* pages;  // [rows / page_rows, rounded up]
  int64_t keys;              // bytes from a page to those of the layer, [heads, page_rows, dim]
  int64_t values;            // as keys
  const char* const* codes;  // of the pages' keys; none: rows are found by a descent
  int64_t scales;            // bytes from a page's codes to the layer's scales, float32 [heads, padded page_rows]
  int64_t coded;             // as scales, to its codes, [heads, padded page_rows / 8, dim / 4 rounded up, 8, 4]
  const int64_t* summaries;  // address of each level's nodes from 1 on, float32 [heads, .., 2 dim], and numbers of a head
  int64_t levels;            // that `summaries` has of each layer
  int64_t top;               // level at which a descent begins
  int64_t nodes;             // of each level that a descent draws at most
  int64_t level_rotation;    // of the ranks of a level's nodes from those of the level below
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
  // Means and variances of a head's nodes of a level.
  const float* nodes_at(int64_t level, int64_t head) const {
    const int64_t* of = summaries + (level - 1) * 2;
    return (const float*)of[0] + head * of[1];
  }
  // Nodes of a level, or rows.
  int64_t count_nodes(int64_t level) const { return rows >> FANOUT_BITS * level; }
  // Nodes or rows that are scored at once at most.
  int64_t most_scored() const {
    return codes ? rows : std::max(count_nodes(top), (nodes + 1) << FANOUT_BITS);
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
  const float* ranks;         // of the stored rows' positions, and of nodes
  int64_t rotation;           // of the ranks
  int64_t rotations;          // they are rotated by less than that
  int64_t index;       // of the head in the session
  int64_t active, group, dim;
  int64_t most;  // rows that are drawn at most
  bool turns;    // active keys are as they were computed, and seen by segments as stored ones

  // Ranks of the nodes of a level, or of the rows.
  const float* ranks_at(int64_t level) const {
    return ranks + (rotation + level * stored->level_rotation) % rotations;
  }
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
      fetch(key(std::min(j + r + 8, n - 1)), head.dim);
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

// Sets the places behind the first n of logits [group, stride] to -inf; stride: a multiple of LANES.
INLINE void close_rows(float* logits, int64_t n, int64_t group, int64_t stride) {
  for (int64_t q = 0; q < group; ++q) std::fill(logits + q * stride + n, logits + (q + 1) * stride, NONE);
}

}  // namespace
