// Descent through the summaries of a head's keys, to rows that stand for all: workers/retrieval/descent.py.
#pragma once

#include "draw.h"
#include "rows.h"

namespace {

// Some nodes of a level, or rows, each once.
struct Some {
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
    logits_ = take(head.group * scored);
    weights_ = take(scored);
    priorities_ = take(scored);
    for (Some* each : {&some_, &below_}) *each = {(int32_t*)take(scored), take(scored), 0};
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
    some_.count = stored_.count_nodes(stored_.top);
    for (int64_t i = 0; i < some_.count; ++i) some_.numbers[i] = int32_t(i);
    std::fill(some_.raised, some_.raised + some_.count, 0.f);
    for (int64_t level = stored_.top; level > 0; --level) {
      weigh_nodes(level);
      go_below(level, draw_some(level, stored_.nodes, chosen_, chosen_counts_));
    }
    weigh_rows();
    const int64_t made = draw_some(0, stored_.count, drawn, counts);
    for (int64_t j = 0; j < made; ++j) {
      counts[j] *= std::exp(some_.raised[drawn[j]]);
      drawn[j] = some_.numbers[drawn[j]];
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
    weigh_some(
        nodes, [&](int64_t j) { return first + some_.numbers[j] * numbers; },
        [&](int64_t j) { return int64_t(some_.numbers[j]) << FANOUT_BITS * level; }, asked_);
  }

  void weigh_rows() {
    weigh_some(
        head_, [&](int64_t j) { return stored_.at<T>(stored_.keys, head_.index, some_.numbers[j], head_.dim); },
        [&](int64_t j) { return int64_t(some_.numbers[j]); }, queries_);
    std::memset(active_, 0, size_t(stored_.rows / 32 + 1) * sizeof *active_);
    for (int64_t i = 0; i < head_.active; ++i)
      if (const int32_t at = head_.positions[i]; at < stored_.rows) active_[at / 32] |= 1u << at % 32;
    for (int64_t j = 0; j < some_.count; ++j)
      if (const int32_t at = some_.numbers[j]; active_[at / 32] >> at % 32 & 1) weights_[j] = -1.f;
  }

  template <typename Keys, typename Key, typename Position>
  void weigh_some(const Head<Keys>& head, Key key, Position position, const float* queries) {
    const int64_t stride = padded(some_.count);
    score_apart(head, some_.count, key, position, queries, logits_, stride);
    for (int64_t q = 0; q < head.group; ++q)
      for (int64_t j = 0; j < some_.count; ++j) logits_[q * stride + j] += some_.raised[j];
    close_rows(logits_, some_.count, head.group, stride);
    weigh(logits_, head.group, stride, priorities_, weights_);
  }

  int64_t draw_some(int64_t level, int64_t most, int32_t* drawn, float* counts) {
    const float* ranks = head_.ranks_at(level);
    for (int64_t j = 0; j < some_.count; ++j) priorities_[j] = weights_[j] * ranks[some_.numbers[j]];
    std::fill(priorities_ + some_.count, priorities_ + padded(some_.count), 0.f);
    return draw(weights_, priorities_, some_.count, most, drawn, counts, logits_);
  }

  // Goes to the 8 below each chosen node, and to those that have no node yet.
  void go_below(int64_t level, int64_t made) {
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
      add(some_.numbers[chosen_[j]], some_.raised[chosen_[j]] + std::log(chosen_counts_[j]));
    add(stored_.count_nodes(level), 0);
    std::swap(some_, below_);
  }

  const Head<T>& head_;
  const Searched& stored_;
  const float* queries_;
  float *logits_, *weights_, *priorities_, *chosen_counts_, *asked_;
  Some some_, below_;
  int32_t* chosen_;
  uint32_t* active_;
};

}  // namespace
