// Draws of rows by their weights: `draw` of workers/retrieval/sampling.py, whose results these are.
#pragma once

#include "vectors.h"

namespace {

// Numbers of the logits of a group to so many rows, in whose place a draw has its memory.
INLINE int64_t count_logits(int64_t group, int64_t rows) { return std::max<int64_t>(2, group) * rows; }

// Each row's share of the softmax, the mean over the queries of a group. Logits become powers of e.
INLINE void weigh(float* logits, int64_t group, int64_t stride, float* weights) {
  constexpr int64_t AT_ONCE = 4;
  for (int64_t first = 0; first < group; first += AT_ONCE) {
    const int64_t some = std::min(AT_ONCE, group - first);
    float* powers = logits + first * stride;
    float shares[AT_ONCE];
    for (int64_t q = 0; q < some; ++q)
      shares[q] = float(1 / (exponentiate(powers + q * stride, stride, powers + q * stride) * double(group)));
    for (int64_t i = 0; i < stride; i += LANES) {
      Floats weight = first ? load(weights + i) : Floats{};
      for (int64_t q = 0; q < some; ++q) weight += load(powers + q * stride + i) * shares[q];
      store(weight, weights + i);
    }
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

// A lower bound of `bisect`: that of the largest of each few numbers. `memory`: of n numbers.
INLINE float find_bound(const float* numbers, int64_t n, int64_t count, float* memory) {
  const int64_t step = std::max<int64_t>(1, n / (4 * (count + 1))) * LANES;
  int64_t made = 0;
  for (int64_t first = 0; first < n; first += step, made += LANES) {
    Floats few = load(numbers + first);
    for (int64_t i = first + LANES; i < std::min(n, first + step); i += LANES) few = larger(load(numbers + i), few);
    store(few, memory + made);
  }
  return bisect(memory, made, count);
}

// Places of the numbers that are no less than a bound, in their order; returns how many they are. Adds without branches,
// which no CPU would guess. `memory`: of n / LANES numbers.
INLINE int64_t gather(const float* numbers, int64_t n, float bound, int32_t* places, int32_t* memory) {
  int64_t vectors = 0, made = 0;
  const Floats bounds = Floats{} + bound;
  for (int64_t first = 0; first < n; first += LANES) {
    memory[vectors] = int32_t(first);
    vectors += any(load(numbers + first) >= bounds);
  }
  for (int64_t j = 0; j < vectors; ++j)
    for (int64_t i = memory[j]; i < memory[j] + LANES; ++i) {
      places[made] = int32_t(i);
      made += numbers[i] >= bound;
    }
  return made;
}

// Sets positions, in their order, of the `count` largest priorities over 0, or of all if they are fewer, and `made` to how
// many they are; of equal ones the first. Returns the largest priority that is left, or 0. `memory`: of 2n numbers.
INLINE float choose(const float* priorities, int64_t n, int64_t count, int32_t* drawn, int64_t& made, float* memory) {
  constexpr float LEAST = std::numeric_limits<float>::denorm_min();
  int32_t* places = (int32_t*)memory;
  float* some = memory + n;
  const float bound = std::max(LEAST, find_bound(priorities, n, count, some));
  const int64_t candidates = gather(priorities, n, bound, places, (int32_t*)some);
  for (int64_t j = 0; j < candidates; ++j) some[j] = priorities[places[j]];
  std::fill(some + candidates, some + padded(candidates), -1.f);
  const float next = bisect(some, padded(candidates), count);
  int64_t over = 0;
  for (int64_t j = 0; j < candidates; ++j) over += some[j] > next;
  int64_t equal = next > 0 ? count - over : 0;  // that are taken
  made = 0;
  for (int64_t j = 0; j < candidates; ++j) {
    const bool taken = some[j] > next || (some[j] == next && equal-- > 0);
    if (taken) drawn[made++] = places[j];
  }
  return next;
}

// Draws rows of weights [padded], negative for no candidate: `draw` of sampling.py, and `take_best` of no more
// rows than `count`. Sets positions, and for how many rows each one counts; returns how many there are. `memory`: of
// twice so many numbers as weights.
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
  const float next = choose(priorities, n, count, drawn, made, memory);
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

}  // namespace
