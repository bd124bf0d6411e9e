// Attention of one KV head of one session to its active rows, and to stored ones that it draws.
//
// Softmax weights of stored keys, priority sampling, and attention over active and drawn rows in one softmax. Of drawn
// rows keys and values are read from the pages that the row store has them in.
//
// A head is computed by one thread in one order, so that results depend neither on the number of threads
// nor on the other sessions.
#pragma once

#include "search.h"

namespace {

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

// Numbers of scratch that `attend_head` needs for so many active rows.
INLINE int64_t count_scratch(int64_t active, int64_t most, const Searched& stored, int64_t group, int64_t dim) {
  const int64_t drawn = group * padded(most);
  return most + group * padded(active + most) + std::max(drawn, stored.rows ? count_search(stored, group, dim) : 0);
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
      fetch(value(j + r + 8), dim);
    }
    add_some(rows, made - j, dim, group, joint + active + j, most, sums);
  }
  return made;
}

}  // namespace
