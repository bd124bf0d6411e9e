// A gated delta net (arXiv 2412.06464): a layer whose past is a sum of outer products, one matrix a head.
#pragma once

#include "products.h"

// As `DeltaLayer` of delta.py.
struct Delta {
  Weight mixed;           // queries and keys of the key heads, and values of the value heads
  Weight gates;           // of the value heads' outputs
  Weight strengths;       // of what a token writes, [value heads, hidden]
  Weight decays;          // of what was there, [value heads, hidden]
  Weight out;
  const float* kernel;    // of the convolution, [channels, width]; channels are those of `mixed`
  const float* rates;     // of the decays, [value heads]
  const float* bias;      // added to the decays, [value heads]
  const float* norm;      // [value dim]
};

// What delta nets of a model have in common, as `DeltaShape` of delta.py.
struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t width;  // of the convolution, as many of whose last inputs a state has
  float epsilon;  // of the norm
};

// A layer's states of a step's sessions, as `DeltaStates` of delta.py.
struct DeltaStates {
  float* inputs;  // the convolution's last ones, [sessions, channels, width]
  float* sums;    // [sessions, value heads, key dim, value dim]
};

namespace {

constexpr float UNIT_EPSILON = 1e-6f;  // of queries and keys of length 1

INLINE int64_t count_channels(const DeltaShape& shape) {
  return 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim;
}

// Numbers that a token's hidden state becomes, [mixed, gates, strengths, decays].
INLINE int64_t count_projected(const DeltaShape& shape) {
  return count_channels(shape) + shape.value_heads * (shape.value_dim + 2);
}

// Numbers of scratch that a key head needs: its query and key, a value and an output.
INLINE int64_t count_scratch(const DeltaShape& shape) {
  return 2 * padded(shape.key_dim) + 2 * padded(shape.value_dim);
}

INLINE float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

INLINE float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Convolves n channels with their last inputs, and keeps those of the next token; `kernel` and `inputs` of the first.
INLINE void convolve(const DeltaShape& shape, const float* kernel, float* inputs, const float* x, int64_t n,
                     float* out) {
  for (int64_t c = 0; c < n; ++c, kernel += shape.width, inputs += shape.width) {
    std::copy(inputs + 1, inputs + shape.width, inputs);
    inputs[shape.width - 1] = x[c];
    float total = 0;
    for (int64_t i = 0; i < shape.width; ++i) total += inputs[i] * kernel[i];
    out[c] = total * sigmoid(total);
  }
}

// Scales numbers to length 1, times `factor`.
INLINE void unify(float* numbers, int64_t n, float factor) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += double(numbers[i]) * numbers[i];
  factor /= std::sqrt(float(squares) + UNIT_EPSILON);
  for (int64_t i = 0; i < n; ++i) numbers[i] *= factor;
}

// Lets V vectors' columns of a head's sums [key dim, value dim] decay, corrects what they say of a key, and asks them.
template <int V>
INLINE void correct_columns(const DeltaShape& shape, float* sums, const float* query, const float* key,
                            const float* value, float decay, float strength, float* out) {
  Floats said[V] = {}, asked[V] = {}, change[V];
  for (int64_t i = 0; i < shape.key_dim; ++i)
    for (int v = 0; v < V; ++v) said[v] += load(sums + i * shape.value_dim + v * LANES) * key[i];
  for (int v = 0; v < V; ++v) change[v] = (load(value + v * LANES) - said[v] * decay) * strength;
  for (int64_t i = 0; i < shape.key_dim; ++i)
    for (int v = 0; v < V; ++v) {
      float* at = sums + i * shape.value_dim + v * LANES;
      const Floats sum = load(at) * decay + change[v] * key[i];
      store(sum, at);
      asked[v] += sum * query[i];
    }
  for (int v = 0; v < V; ++v) store(asked[v], out + v * LANES);
}

// As `correct_columns`, of all columns: a multiple of a vector's lanes.
INLINE void correct(const DeltaShape& shape, float* sums, const float* query, const float* key, const float* value,
                    float decay, float strength, float* out) {
  int64_t at = 0;
  for (; at + 4 * LANES <= shape.value_dim; at += 4 * LANES)
    correct_columns<4>(shape, sums + at, query, key, value + at, decay, strength, out + at);
  for (; at < shape.value_dim; at += LANES)
    correct_columns<1>(shape, sums + at, query, key, value + at, decay, strength, out + at);
}

// The value heads of one key head: from a session's `projected` numbers to gated outputs [value heads, value dim].
INLINE void recur(const Delta& layer, const DeltaShape& shape, const DeltaStates& states, int64_t session,
                  int64_t head, const float* projected, float* attended, float* scratch) {
  const int64_t keys = shape.key_dim, values = shape.value_dim, channels = count_channels(shape);
  const int64_t group = shape.value_heads / shape.key_heads;
  float* inputs = states.inputs + session * channels * shape.width;
  float *query = scratch, *key = query + padded(keys), *value = key + padded(keys), *out = value + padded(values);
  const auto mix = [&](int64_t first, int64_t n, float* into) {
    convolve(shape, layer.kernel + first * shape.width, inputs + first * shape.width, projected + first, n, into);
  };
  mix(head * keys, keys, query);
  mix((shape.key_heads + head) * keys, keys, key);
  unify(query, keys, 1 / std::sqrt(float(keys)));
  unify(key, keys, 1);
  for (int64_t at = head * group; at < (head + 1) * group; ++at) {
    mix(2 * shape.key_heads * keys + at * values, values, value);
    const float* gates = projected + channels + at * values;
    const float* strengths = projected + channels + shape.value_heads * values;
    const float decay = -layer.rates[at] * softplus(strengths[shape.value_heads + at] + layer.bias[at]);
    float* sums = states.sums + (session * shape.value_heads + at) * keys * values;
    correct(shape, sums, query, key, value, std::exp(decay), sigmoid(strengths[at]), out);
    normalize(out, layer.norm, values, shape.epsilon, out);
    gate(gates, out, values, attended + at * values);
  }
}

}  // namespace
