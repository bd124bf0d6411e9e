// Vectors of numbers that native code computes with.
//
// They are the compiler's (GCC, Clang) and no instruction set's: the same source is compiled for several
// (setup.py), and library.py loads the one that the CPU has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t LANES = 8;
constexpr int64_t LINE = 64;  // bytes that are fetched at once
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE float widen(float number) { return number; }

INLINE float widen(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE float widen(int8_t number) { return number; }

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
#ifdef __AVX2__  // GCC 12 makes seven instructions of what is one
  return (Floats)((Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#endif
  Halves loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return (Floats)(__builtin_convertvector(loaded, Ints) << 16);
}

INLINE Floats load(const int8_t* from) {
#ifdef __AVX2__
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
  typedef int8_t Eight __attribute__((vector_size(LANES)));
  Eight loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return __builtin_convertvector(loaded, Floats);
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

// Larger ones of both; of a number and one that is none, `b`.
INLINE Floats larger(Floats a, Floats b) {
#ifdef __AVX2__
  return _mm256_max_ps(a, b);
#else
  const Ints first = a > b;
  return (Floats)(((Ints)a & first) | ((Ints)b & ~first));
#endif
}

INLINE float largest(Floats lanes) {
  float most = lanes[0];
  for (int64_t lane = 1; lane < LANES; ++lane) most = std::max(most, lanes[lane]);
  return most;
}

INLINE bool any(Ints lanes) {
#ifdef __AVX2__
  return _mm256_movemask_epi8((__m256i)lanes) != 0;
#endif
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

// Adds products of four bytes, each up to 127, with four of a query to each lane's sum.
INLINE Ints add_products(Ints sums, Bytes bytes, int32_t query) {
#ifdef __AVX2__  // no compiler finds them in vectors of its own
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi32(query));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  int8_t four[4];
  std::memcpy(four, &query, sizeof four);
  for (int c = 0; c < 4; ++c) sums += ((Ints)bytes >> 8 * c & 0xff) * four[c];
  return sums;
#endif
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
  for (int64_t i = LANES; i < n; i += LANES) most = larger(load(logits + i), most);
  const Floats top = Floats{} + largest(most);
  return sum_terms(n, [&](int64_t i) {
    const Floats power = exponential(load(logits + i) - top);
    store(power, powers + i);
    return power;
  });
}

// Fetches numbers that lie one after the other into the first cache.
template <typename T>
INLINE void fetch(const T* from, int64_t numbers) {
  for (int64_t c = 0; c < numbers; c += LINE / int64_t(sizeof(T))) __builtin_prefetch(from + c);
}

}  // namespace
