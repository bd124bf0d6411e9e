// Products of a model's weights with the hidden numbers of some sessions, and what is done to them in between.
#pragma once

#include "vectors.h"

enum Format : int64_t { FLOAT32, BFLOAT16, INT8, INT4 };

// A matrix, as `Weight` of weight.py.
struct Weight {
  const void* numbers;  // [outputs, inputs]; in 4 bits [outputs / 8, inputs / 32] of `Group`
  const float* bias;    // [outputs], or none
  const float* scales;  // in 8 bits: of each output; else none
  Format format;
  int64_t outputs, inputs;
};

namespace {

constexpr int64_t GROUP = 32;  // inputs whose weights in 4 bits have a scale and a middle in common

// Weights of 8 outputs and 32 inputs, in bytes of 4 inputs of each output; in a byte's upper half that of 16 inputs on.
struct Group {
  uint16_t scales[LANES];   // bfloat16
  uint16_t middles[LANES];  // what code 8 stands for, as scales
  Bytes codes[GROUP / 8];   // 0 to 15
};

constexpr int64_t PIECE_BYTES = 65536;  // of weights, that a thread takes at once

// Products of R rows with B inputs, out [B, stride]. Each is summed in the same order whatever R and B are. For each
// line of a row, F lines from `next` on are fetched into the second cache.
template <int R, int B, int F, typename T>
INLINE void multiply_rows(const T* const rows[R], int64_t inputs, const float* x, float* out, int64_t stride,
                          const T* next) {
  constexpr int64_t line = LINE / int64_t(sizeof(T));
  Floats sums[R][B] = {};
  const auto add = [&](int64_t c) __attribute__((always_inline)) {
    Floats some[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) some[r] = load(rows[r] + c);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const Floats numbers = load(x + b * inputs + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][b] += some[r] * numbers;
    }
  };
  const int64_t whole = inputs / LANES * LANES;
  int64_t first = 0;
  for (; first + line <= whole; first += line) {
#pragma GCC unroll 4
    for (int f = 0; f < F; ++f) __builtin_prefetch(next + F * first + f * line, 0, 2);
#pragma GCC unroll 4
    for (int64_t i = 0; i < line; i += LANES) add(first + i);
  }
  for (; first < whole; first += LANES) add(first);
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    Quad four = sum(sums[0][b], sums[1 % R][b], sums[2 % R][b], sums[3 % R][b]);
    for (int64_t c = whole; c < inputs; ++c)
      four += Quad{widen(rows[0][c]), widen(rows[1 % R][c]), widen(rows[2 % R][c]), widen(rows[3 % R][c])} *
              x[b * inputs + c];
    for (int r = 0; r < R; ++r) out[b * stride + r] = four[r];
  }
}

// Products of R rows with inputs [batch, inputs], out [batch, stride]; F and `next`: of each pass over the rows.
template <int R, int F, typename T>
INLINE void multiply_block(const T* const rows[R], int64_t inputs, const float* x, int64_t batch, float* out,
                           int64_t stride, const T* next) {
  for (int64_t b = 0; b < batch; next += F * inputs) {
    const float* some = x + b * inputs;
    float* into = out + b * stride;
    switch (batch - b) {  // more sums than those of three would not stay in registers
      case 1: multiply_rows<R, 1, F>(rows, inputs, some, into, stride, next); b += 1; break;
      case 2:
      case 4: multiply_rows<R, 2, F>(rows, inputs, some, into, stride, next); b += 2; break;
      default: multiply_rows<R, 3, F>(rows, inputs, some, into, stride, next); b += 3;
    }
  }
}

// Products of the rows from `first` to `last` with inputs [batch, inputs], out [batch, stride].
template <typename T>
void multiply_part(const Weight& weight, int64_t first, int64_t last, const float* x, int64_t batch, float* out,
                   int64_t stride) {
  const int64_t inputs = weight.inputs;
  const T* numbers = (const T*)weight.numbers;
  int64_t row = first;
  for (; row + 4 <= last; row += 4) {
    const T* at = numbers + row * inputs;
    float* into = out + row - first;
    const T* rows[4] = {at, at + inputs, at + 2 * inputs, at + 3 * inputs};
    if (batch > 3)  // in two passes or more
      multiply_block<4, 2, T>(rows, inputs, x, batch, into, stride, at + 4 * inputs);
    else
      multiply_block<4, 4, T>(rows, inputs, x, batch, into, stride, at + 4 * inputs);
  }
  for (; row < last; ++row) {
    const T* rows[1] = {numbers + row * inputs};
    multiply_block<1, 0, T>(rows, inputs, x, batch, out + row - first, stride, numbers);
  }
}

// Inputs in 8 bits, beside weights in 4: of each 32 a scale, so that products of whole numbers are summed.
struct Coded {
  int32_t* quads;  // four codes in each, [batch, inputs / 4]
  float* scales;   // [batch, inputs / 32]
  float* sums;     // of the inputs, as scales
  int32_t* eights;  // of the codes, times the code that stands for the middle, as scales

  static int64_t count(int64_t batch, int64_t inputs) { return padded(batch * (inputs / 4 + 3 * (inputs / GROUP))); }
};

INLINE Coded encode(const float* x, int64_t batch, int64_t inputs, float* memory) {
  const int64_t groups = inputs / GROUP;
  Coded coded{};
  coded.quads = (int32_t*)memory;
  coded.scales = memory + batch * inputs / 4;
  coded.sums = coded.scales + batch * groups;
  coded.eights = (int32_t*)(coded.sums + batch * groups);
  const Floats round = Floats{} + 12582912.f;  // 1.5 * 2^23: a sum with it has no fraction
  for (int64_t group = 0; group < batch * groups; ++group) {
    const float* numbers = x + group * GROUP;
    Floats most{}, total{};
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Floats some = load(numbers + i);
      most = larger(larger(some, -some), most);
      total += some;
    }
    const float scale = largest(most) / 127;
    const Floats step = Floats{} + std::max(scale, std::numeric_limits<float>::min());
    Ints codes_sum{};
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Ints whole = __builtin_convertvector((load(numbers + i) / step + round) - round, Ints);
      codes_sum += whole;
      typedef int8_t Eight __attribute__((vector_size(LANES)));
      const Eight eight = __builtin_convertvector(whole, Eight);
      std::memcpy((char*)coded.quads + group * GROUP + i, &eight, sizeof eight);
    }
    int32_t codes = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) codes += codes_sum[lane];
    coded.scales[group] = scale;
    coded.sums[group] = sum(total);
    coded.eights[group] = 8 * codes;
  }
  return coded;
}

// Products of 8 rows with B inputs from `first` on, out [B, stride].
template <int B>
INLINE void multiply_groups(const Group* groups, int64_t count, const Coded& x, int64_t first, float* out,
                            int64_t stride) {
  Floats sums[B] = {};
  for (int64_t g = 0; g < count; ++g) {
    const Group& group = groups[g];
    Ints dots[B] = {};
#pragma GCC unroll 4
    for (int i = 0; i < GROUP / 8; ++i) {
      Ints both;
      std::memcpy(&both, group.codes + i, sizeof both);
      const Bytes low = (Bytes)(both & 0x0f0f0f0f), high = (Bytes)(both >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const int32_t* quads = x.quads + ((first + b) * count + g) * (GROUP / 4) + i;
        dots[b] = add_products(add_products(dots[b], low, quads[0]), high, quads[GROUP / 8]);
      }
    }
    const Floats scales = load(group.scales), middles = load(group.middles);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const int64_t at = (first + b) * count + g;
      const Floats whole = __builtin_convertvector(dots[b] - x.eights[at], Floats);
      sums[b] += whole * x.scales[at] * scales + middles * x.sums[at];
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) store(sums[b], out + (first + b) * stride);
}

// As `multiply_part`, with weights in 4 bits; `first` and `last`: multiples of 8.
INLINE void multiply_coded(const Weight& weight, int64_t first, int64_t last, const Coded& x, int64_t batch, float* out,
                           int64_t stride) {
  const int64_t count = weight.inputs / GROUP;
  for (int64_t row = first; row < last; row += LANES) {
    const Group* groups = (const Group*)weight.numbers + row / LANES * count;
    float* into = out + row - first;
    for (int64_t b = 0; b < batch;) {
      switch (batch - b) {
        case 1: multiply_groups<1>(groups, count, x, b, into, stride); b += 1; break;
        case 2: multiply_groups<2>(groups, count, x, b, into, stride); b += 2; break;
        case 3: multiply_groups<3>(groups, count, x, b, into, stride); b += 3; break;
        default: multiply_groups<4>(groups, count, x, b, into, stride); b += 4;
      }
    }
  }
}

// What weights are multiplied with.
struct Inputs {
  const float* numbers;
  Coded coded;  // where a weight is in 4 bits
};

INLINE void multiply(const Weight& weight, int64_t first, int64_t last, const Inputs& x, int64_t batch, float* out,
                     int64_t stride) {
  switch (weight.format) {
    case FLOAT32: multiply_part<float>(weight, first, last, x.numbers, batch, out, stride); break;
    case BFLOAT16: multiply_part<uint16_t>(weight, first, last, x.numbers, batch, out, stride); break;
    case INT8: multiply_part<int8_t>(weight, first, last, x.numbers, batch, out, stride); break;
    case INT4: multiply_coded(weight, first, last, x.coded, batch, out, stride);
  }
  for (int64_t b = 0; weight.scales && b < batch; ++b)
    for (int64_t i = first; i < last; ++i) out[b * stride + i - first] *= weight.scales[i];
  for (int64_t b = 0; weight.bias && b < batch; ++b)
    for (int64_t i = first; i < last; ++i) out[b * stride + i - first] += weight.bias[i];
}

INLINE int64_t row_bytes(const Weight& weight) {
  switch (weight.format) {
    case FLOAT32: return 4 * weight.inputs;
    case BFLOAT16: return 2 * weight.inputs;
    case INT8: return weight.inputs;
    default: return weight.inputs / GROUP * int64_t(sizeof(Group)) / LANES;
  }
}

// Rows of a weight that a thread takes at once: so that all threads have some.
INLINE int64_t piece_rows(const Weight& weight, int64_t threads) {
  const int64_t most = std::min(PIECE_BYTES / row_bytes(weight), weight.outputs / (2 * threads));
  return std::max<int64_t>(1, most / LANES) * LANES;
}

INLINE int64_t count_pieces(const Weight& weight, int64_t threads) {
  const int64_t rows = piece_rows(weight, threads);
  return (weight.outputs + rows - 1) / rows;
}

// RMSNorm of numbers [n].
INLINE void normalize(const float* x, const float* weight, int64_t n, float epsilon, float* out) {
  const int64_t whole = n / LANES * LANES;
  double squares = sum_terms(whole, [&](int64_t i) { return load(x + i) * load(x + i); });
  for (int64_t i = whole; i < n; ++i) squares += x[i] * x[i];
  const float factor = 1 / std::sqrt(float(squares / double(n)) + epsilon);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// Gates [n] by silu, times what they let through.
INLINE void gate(const float* gates, const float* through, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += LANES) {
    Floats some{}, passed{};
    const size_t bytes = size_t(std::min(LANES, n - i)) * sizeof(float);
    std::memcpy(&some, gates + i, bytes);
    std::memcpy(&passed, through + i, bytes);
    const Ints negative = some < 0;
    const Floats power = exponential((Floats)((Ints)some | (Ints{} + std::numeric_limits<int32_t>::min())));
    const Floats upper = (Floats)(((Ints)power & negative) | ((Ints)(Floats{} + 1.f) & ~negative));
    const Floats gated = some * passed * (upper / (power + 1.f));
    std::memcpy(out + i, &gated, bytes);
  }
}

}  // namespace
