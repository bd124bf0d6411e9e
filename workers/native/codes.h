// Scores of stored keys by their codes: kvstore/index/key_codes.py.
#pragma once

#include "rows.h"

namespace {

constexpr int32_t KEY_OFFSET = 64;  // is added to a key's codes, which are bytes without a sign: as in key_codes.py

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

constexpr int64_t PAGES_AHEAD = 2;  // whose codes are fetched while those of a page are scored

// Logits [group, stride] of the codes of the stored rows from `first` to `last`, and of some of those just before. A
// page's codes are fetched while those of pages before it are scored: pages lie anywhere, and no CPU guesses where
// the next one is.
INLINE void score_stored(const Searched& stored, int64_t first, int64_t last, int64_t head, int64_t dim, int64_t group,
                         const Asked& asked, float* logits, int64_t stride) {
  const int64_t quads = count_quads(dim);
  for (int64_t at = first, after; at < last; at = after) {
    const int64_t page = at / stored.page_rows * stored.page_rows, skipped = (at - page) / LANES * LANES;
    after = std::min(last, page + stored.page_rows);
    const uint8_t* codes = stored.codes_at(head, at, dim) + skipped * quads * 4;
    const float* scales = stored.scales_at(head, at) + skipped;
    if (const int64_t ahead = page + PAGES_AHEAD * stored.page_rows; ahead < last) {
      fetch(stored.codes_at(head, ahead, dim), padded(stored.page_rows) * quads * 4);
      fetch(stored.scales_at(head, ahead), padded(stored.page_rows));
    }
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

}  // namespace
