// Descent through the summaries of a head's keys, to rows that stand for all: workers/retrieval/descent.py.
#pragma once

#include "draw.h"
#include "rows.h"

namespace {

// Nodes of a level, or rows, that are scored, each once.
struct Candidates {
  int32_t* numbers;
  float* raised;  // what their logits are raised by, for others that they stand for
  int64_t count;
};

template <typename T>
class Descent {
 public:
  // Takes scratch of `count_search` numbers.
  Descent(const Head<T>& head, const float* queries, float* scratch) : head_(head), stored_(*head.stored) {
    const int64_t scored = padded(stored_.most_scored()), numbers = 2 * head.group * head.dim;
    const auto take = [&](int64_t n) {
      float* const taken = scratch;
      scratch += padded(n);
      return taken;
    };
    logits_ = take(count_logits(head.group, scored));
    weights_ = take(scored);
    priorities_ = take(scored);
    for (Candidates* each : {&scored_, &below_}) *each = {(int32_t*)take(scored), take(scored), 0};
    chosen_ = (int32_t*)take(stored_.nodes);
    chosen_counts_ = take(stored_.nodes);
    asked_ = take(count_segments(stored_) * numbers);
    active_ = (uint32_t*)take(stored_.rows / 32 + 1);
    for (int64_t segment = 0; segment < count_segments(stored_); ++segment)
      square(get_segment(head, segment, queries).queries, asked_ + segment * numbers);
    queries_ = queries;
  }

  // Sets positions and counts of drawn rows; returns how many they are.
  int64_t search(int32_t* drawn, float* counts) {
    scored_.count = stored_.count_nodes(stored_.top);
    for (int64_t i = 0; i < scored_.count; ++i) scored_.numbers[i] = int32_t(i);
    std::fill(scored_.raised, scored_.raised + scored_.count, 0.f);
    for (int64_t level = stored_.top; level > 0; --level) {
      weigh_nodes(level);
      descend(level, draw_candidates(level, stored_.nodes, chosen_, chosen_counts_));
    }
    weigh_rows();
    const int64_t made = draw_candidates(0, stored_.count, drawn, counts);
    for (int64_t j = 0; j < made; ++j) {
      counts[j] *= std::exp(scored_.raised[drawn[j]]);
      drawn[j] = scored_.numbers[drawn[j]];
    }
    return made;
  }

 private:
  // Queries and half their squares: a product with a node's mean and variance is the logarithm of the mean of `exp(q k)`
  // over keys that are normally distributed.
  void square(const float* queries, float* asked) const {
    for (int64_t q = 0; q < head_.group; ++q, queries += head_.dim, asked += 2 * head_.dim)
      for (int64_t c = 0; c < head_.dim; ++c) {
        asked[c] = queries[c];
        asked[head_.dim + c] = queries[c] * queries[c] / 2;
      }
  }

  void weigh_nodes(int64_t level) {
    const int64_t numbers = 2 * head_.dim;
    Searched asked = stored_;
    asked.turned = asked_;
    asked.segment_step = head_.group * numbers;
    asked.head_step = 0;
    Head<float> nodes{};
    nodes.stored = &asked;
    nodes.group = head_.group;
    nodes.dim = numbers;
    const float* first = stored_.nodes_at(level, head_.index);
    weigh_candidates(
        nodes, [&](int64_t j) { return first + scored_.numbers[j] * numbers; },
        [&](int64_t j) { return int64_t(scored_.numbers[j]) << FANOUT_BITS * level; }, asked_);
  }

  void weigh_rows() {
    weigh_candidates(
        head_, [&](int64_t j) { return stored_.at<T>(stored_.keys, head_.index, scored_.numbers[j], head_.dim); },
        [&](int64_t j) { return int64_t(scored_.numbers[j]); }, queries_);
    std::memset(active_, 0, size_t(stored_.rows / 32 + 1) * sizeof *active_);
    for (int64_t i = 0; i < head_.active; ++i)
      if (const int32_t at = head_.positions[i]; at < stored_.rows) active_[at / 32] |= 1u << at % 32;
    for (int64_t j = 0; j < scored_.count; ++j)
      if (const int32_t at = scored_.numbers[j]; active_[at / 32] >> at % 32 & 1) weights_[j] = -1.f;
  }

  template <typename Keys, typename Key, typename Position>
  void weigh_candidates(const Head<Keys>& head, Key key, Position position, const float* queries) {
    const int64_t stride = padded(scored_.count);
    score_apart(head, scored_.count, key, position, queries, logits_, stride);
    for (int64_t q = 0; q < head.group; ++q)
      for (int64_t j = 0; j < scored_.count; ++j) logits_[q * stride + j] += scored_.raised[j];
    close_rows(logits_, scored_.count, head.group, stride);
    weigh(logits_, head.group, stride, weights_);
  }

  int64_t draw_candidates(int64_t level, int64_t most, int32_t* drawn, float* counts) {
    const float* ranks = head_.ranks_at(level);
    for (int64_t j = 0; j < scored_.count; ++j) priorities_[j] = weights_[j] * ranks[scored_.numbers[j]];
    std::fill(priorities_ + scored_.count, priorities_ + padded(scored_.count), 0.f);
    return draw(weights_, priorities_, scored_.count, most, drawn, counts, logits_);
  }

  // Goes to those below each chosen node, and to those that have no node yet.
  void descend(int64_t level, int64_t made) {
    const int64_t end = stored_.count_nodes(level - 1);
    below_.count = 0;
    const auto add = [&](int64_t node, float raised) {
      const int64_t first = node << FANOUT_BITS, last = std::min(end, (node + 1) << FANOUT_BITS);
      for (int64_t number = first; number < last; ++number) {
        below_.numbers[below_.count] = int32_t(number);
        below_.raised[below_.count++] = raised;
      }
    };
    for (int64_t j = 0; j < made; ++j)
      add(scored_.numbers[chosen_[j]], scored_.raised[chosen_[j]] + std::log(chosen_counts_[j]));
    add(stored_.count_nodes(level), 0);
    std::swap(scored_, below_);
  }

  const Head<T>& head_;
  const Searched& stored_;
  const float* queries_;
  float *logits_, *weights_, *priorities_, *chosen_counts_, *asked_;
  Candidates scored_, below_;
  int32_t* chosen_;
  uint32_t* active_;
};

}  // namespace
