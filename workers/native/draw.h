// Draws of rows by their weights: `draw` of workers/retrieval/sampling.py, whose results these are.
#pragma once

#include "vectors.h"

namespace {

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

}  // namespace
