// Searches of a head's stored rows.
#pragma once

#include "codes.h"
#include "descent.h"

namespace {

// Numbers of scratch that `search` needs.
INLINE int64_t count_search(const Searched& stored, int64_t group, int64_t dim) {
  const int64_t scored = padded(stored.most_scored());
  const int64_t of_logits = count_logits(group, scored);
  if (stored.codes) return of_logits + 2 * scored + count_asked(group, dim);
  return of_logits + 6 * scored + 2 * padded(stored.nodes) + padded(count_segments(stored) * group * 2 * dim) +
         padded(stored.rows / 32 + 1);
}

// As `search`, where every row is scored.
template <typename T>
INLINE int64_t search_all(const Head<T>& head, const float* queries, float* logits, int32_t* drawn, float* counts) {
  const Searched& stored = *head.stored;
  const int64_t stride = padded(stored.rows);
  float* weights = logits + count_logits(head.group, stride);
  float* priorities = weights + stride;
  for (int64_t index = count_segments(stored) - 1; index >= 0; --index) {  // each sets some logits of the one before
    const Segment some = get_segment(head, index, queries);
    if (some.first >= stored.rows) continue;
    const Asked asked = encode_queries(some.queries, head.group, head.dim, priorities + stride);
    score_stored(stored, some.first, std::min(some.last, stored.rows), head.index, head.dim, head.group, asked, logits,
                 stride);
  }
  close_rows(logits, stored.rows, head.group, stride);
  weigh(logits, head.group, stride, weights);
  for (int64_t i = 0; i < head.active; ++i)
    if (head.positions[i] < stored.rows) weights[head.positions[i]] = -1.f;
  const float* ranks = head.ranks_at(0);
  for (int64_t i = 0; i < stride; i += LANES) store(load(weights + i) * load(ranks + i), priorities + i);
  return draw(weights, priorities, stored.rows, stored.count, drawn, counts, logits);
}

// Draws of the stored rows for queries [group, dim], none that is active. Sets positions and counts of drawn ones;
// returns how many they are. `scratch`: of `count_search` numbers.
template <typename T>
INLINE int64_t search(const Head<T>& head, const float* queries, float* scratch, int32_t* drawn, float* counts) {
  return head.stored->codes ? search_all(head, queries, scratch, drawn, counts)
                            : Descent<T>(head, queries, scratch).search(drawn, counts);
}

}  // namespace
