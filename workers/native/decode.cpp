// A whole decode step of a dense model: one new token of each session, from its number to the next one's logits.
//
// RMSNorm, products of weights, rotary embedding, attention (head.h), gated MLP, over the memory of the slots and of
// the row store's pages. Weights are read once for all sessions. A number is computed by one thread in one
// order, which neither the number of threads nor the other sessions change.
#include "head.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

enum Format : int64_t { FLOAT32, BFLOAT16, INT8, INT4 };

// A matrix, as `Weight` of weight.py.
struct Weight {
  const void* numbers;  // [outputs, inputs]; in 4 bits [outputs / 8, inputs / 32] of `Group`
  const float* bias;    // [outputs], or none
  const float* scales;  // in 8 bits: of each output; else none
  Format format;
  int64_t outputs, inputs;
};

// As `Layer` of weights.py.
struct Layer {
  Weight queries, keys, values, out, gate, up, down;
  const float* attention_norm;  // [hidden]
  const float* mlp_norm;        // [hidden]
  const float* query_norm;      // [dim], or none
  const float* key_norm;        // as query_norm
};

// As `Model` of weights.py.
struct Model {
  const Layer* layers;
  int64_t n_layers;
  Weight embedding, head;    // [vocabulary, hidden]
  const float* norm;         // [hidden]
  const float* frequencies;  // of the rotary embedding, [rotated / 2]
  int64_t hidden, inner, heads, group, dim, rotated;
  float rotary_scale, scale, epsilon, head_epsilon;
};

// One new token of each session, as `Step` of step.py.
struct Step {
  const Model* model;
  const Searched* stored;    // [sessions], of the first layer
  int64_t layer_bytes;       // of a page, from a layer to the next
  int64_t rotations;         // ranks are rotated by less than that
  int64_t layer_rotation;    // and those of a layer by so much from those of the one before
  const int64_t* tokens;     // [sessions]
  const int32_t* positions;  // [sessions]
  const int32_t* places;     // at which the model computes the tokens, as positions
  const int64_t* starts;     // of each head's rows in the slots, [n_layers, sessions, heads]
  const int64_t* lengths;    // rows before the new one, as starts
  void* keys;                // of the slots, [rows, dim]
  void* values;              // as keys
  const int32_t* row_positions;  // [rows]; the new rows' are set
  void* rows;                // the new rows once more, [sessions, n_layers, 2, heads, dim]
  void* queries;             // with rotary embedding, [n_layers, sessions, heads, group, dim]; or none
  float* logits;             // [sessions, vocabulary]
  int32_t* drawn;            // [n_layers, sessions, heads, 1 + most]: as those of `Call`
  int64_t most;              // the largest `count`
  int64_t sessions;
  float* scratch;            // `decode_scratch` numbers
  int64_t threads;
  int64_t attention_ns;      // set to the time that attention took
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
constexpr int SPINS = 2000;             // before a thread that waits lets others run

// Threads that share the work of each phase of a step, and wait for each other at its end.
class Team {
 public:
  explicit Team(int64_t phases) : taken_(size_t(phases)) {}

  // Runs work(thread) on so many threads, or on fewer where the system has no more.
  template <typename Work>
  void run(int64_t threads, Work work) {
    std::vector<std::thread> helpers;
    try {
      helpers.reserve(size_t(threads));
      for (int64_t thread = 1; thread < threads; ++thread)
        helpers.emplace_back([this, work, thread] {
          wait_while([this] { return threads_.load(std::memory_order_acquire) == 0; });
          work(thread);
        });
    } catch (const std::exception&) {
      // Those that there are do all.
    }
    threads_.store(int64_t(helpers.size()) + 1, std::memory_order_release);
    work(0);
    for (std::thread& helper : helpers) helper.join();
  }

  // Does the n parts of a phase, each on one of the threads, which all call this.
  template <typename Work>
  void share(int64_t phase, int64_t n, Work work) {
    std::atomic<int64_t>& taken = taken_[size_t(phase)];
    for (int64_t i = taken++; i < n; i = taken++) work(i);
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      wait_while([&] { return round_.load(std::memory_order_acquire) == round; });
    }
  }

 private:
  template <typename Waits>
  static void wait_while(Waits waits) {
    for (int spins = 0; waits(); ++spins)
      if (spins > SPINS) std::this_thread::yield();
  }

  std::vector<std::atomic<int64_t>> taken_;
  std::atomic<int64_t> threads_{0}, arrived_{0}, round_{0};
};

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

// Memory of a step that its threads share, and of each of them.
struct Shared {
  float *x, *cosines, *sines, *projected, *attended, *inner, *turns;
};
struct Own {
  float *normed, *first, *second, *queries, *turned, *coded, *head;
};

// Segments of the session that has most.
INLINE int64_t most_segments(const Step& step) {
  int64_t most = 0;
  for (int64_t b = 0; b < step.sessions; ++b) most = std::max(most, step.stored[b].segments);
  return most;
}

// A step as its threads compute it; `T`: numbers of rows.
template <typename T>
class Decode {
 public:
  explicit Decode(Step& step) : step_(step), model_(*step.model), team_(5 * step.model->n_layers + 1) {
    float* free = step.scratch;
    shared_ = {};
    const int64_t batch = step.sessions;
    for (auto [at, numbers] : {std::pair{&shared_.x, model_.hidden},
                               {&shared_.cosines, model_.rotated / 2},
                               {&shared_.sines, model_.rotated / 2},
                               {&shared_.projected, projected()},
                               {&shared_.attended, model_.heads * model_.group * model_.dim},
                               {&shared_.inner, model_.inner},
                               {&shared_.turns, most_segments(step) * model_.rotated}}) {
      *at = free;
      free += padded(batch * numbers);
    }
    own_ = free;
    own_size_ = count_own(step);
  }

  // Numbers of scratch for all.
  static int64_t count(const Step& step) {
    const Model& model = *step.model;
    const int64_t heads = model.heads * (model.group + 2) * model.dim;
    int64_t shared = 0;
    for (int64_t numbers : {model.hidden, model.rotated / 2, model.rotated / 2, heads,
                            model.heads * model.group * model.dim, model.inner, most_segments(step) * model.rotated})
      shared += padded(step.sessions * numbers);
    return shared + step.threads * count_own(step);
  }

  void run() {
    for (int64_t b = 0; b < step_.sessions; ++b) begin(b);
    team_.run(step_.threads, [this](int64_t thread) { work(thread); });
  }

 private:
  static int64_t piece(const Step& step) {
    return padded(step.sessions * (PIECE_BYTES / 2));
  }

  // Numbers of the inputs of any weight, where some are in 4 bits.
  static int64_t count_coded(const Step& step) {
    const Model& model = *step.model;
    const int64_t most = std::max({model.hidden, model.inner, model.heads * model.group * model.dim});
    return Coded::count(step.sessions, most);
  }

  static int64_t count_own(const Step& step) {
    const Model& model = *step.model;
    int64_t head = 0;
    for (int64_t b = 0; b < step.sessions; ++b) {
      int64_t longest = 0;
      for (int64_t l = 0; l < model.n_layers; ++l)
        for (int64_t h = 0; h < model.heads; ++h)
          longest = std::max(longest, step.lengths[(l * step.sessions + b) * model.heads + h]);
      const Searched& stored = step.stored[b];
      head = std::max(head, count_scratch(longest + 1, stored.rows ? stored.count : 0, stored, model.group,
                                          model.dim));
    }
    const int64_t queries = padded(model.group * model.dim);
    return padded(step.sessions * model.hidden) + 2 * piece(step) + (1 + most_segments(step)) * queries +
           count_coded(step) + padded(head);
  }

  int64_t projected() const { return model_.heads * (model_.group + 2) * model_.dim; }

  Own own(int64_t thread) const {
    float* free = own_ + thread * own_size_;
    Own own{};
    own.normed = free;
    own.first = own.normed + padded(step_.sessions * model_.hidden);
    own.second = own.first + piece(step_);
    own.queries = own.second + piece(step_);
    own.turned = own.queries + padded(model_.group * model_.dim);
    own.coded = own.turned + most_segments(step_) * padded(model_.group * model_.dim);
    own.head = own.coded + count_coded(step_);
    return own;
  }

  // Cosines and sines by which a session's queries are turned against each segment's shift, [2, rotated / 2].
  float* turns(int64_t session, int64_t segment) const {
    return shared_.turns + (session * most_segments(step_) + segment) * model_.rotated;
  }

  // The token's embedding, and the angles of its place and of the segments that it sees.
  void begin(int64_t session) {
    const int64_t hidden = model_.hidden, half = model_.rotated / 2;
    const int64_t at = step_.tokens[session] * hidden;
    float* x = shared_.x + session * hidden;
    for (int64_t i = 0; i < hidden; ++i)
      x[i] = model_.embedding.format == BFLOAT16 ? widen(((const uint16_t*)model_.embedding.numbers)[at + i])
                                          : ((const float*)model_.embedding.numbers)[at + i];
    for (int64_t i = 0; i < half; ++i) {
      const float angle = float(step_.places[session]) * model_.frequencies[i];
      shared_.cosines[session * half + i] = std::cos(angle) * model_.rotary_scale;
      shared_.sines[session * half + i] = std::sin(angle) * model_.rotary_scale;
    }
    const Searched& stored = step_.stored[session];
    for (int64_t segment = 0; segment < stored.segments; ++segment) {
      float* turn = turns(session, segment);
      for (int64_t i = 0; i < half; ++i) {
        const double angle = -double(stored.shifts[segment]) * double(model_.frequencies[i]);
        turn[i] = float(std::cos(angle));
        turn[half + i] = float(std::sin(angle));
      }
    }
  }

  void work(int64_t thread) {
    const Own mine = own(thread);
    int64_t phase = 0;
    for (int64_t index = 0; index < model_.n_layers; ++index) {
      const Layer& layer = model_.layers[index];
      normalize_all(layer.attention_norm, mine);
      project(phase++, layer, mine);
      const auto began = std::chrono::steady_clock::now();
      team_.share(phase++, step_.sessions * model_.heads,
                  [&](int64_t i) { attend(index, i / model_.heads, i % model_.heads, mine); });
      if (thread == 0)
        step_.attention_ns +=
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
      add(phase++, layer.out, shared_.attended, mine);
      normalize_all(layer.mlp_norm, mine);
      feed(phase++, layer, mine);
      add(phase++, layer.down, shared_.inner, mine);
    }
    normalize_all(model_.norm, mine);
    find_logits(phase, mine);
  }

  void normalize_all(const float* weight, const Own& mine) {
    for (int64_t b = 0; b < step_.sessions; ++b)
      normalize(shared_.x + b * model_.hidden, weight, model_.hidden, model_.epsilon, mine.normed + b * model_.hidden);
  }

  // Prepares what some weights are multiplied with, [sessions, inputs].
  Inputs prepare(std::initializer_list<const Weight*> weights, const float* x, const Own& mine) const {
    for (const Weight* weight : weights)
      if (weight->format == INT4) return {x, encode(x, step_.sessions, weight->inputs, mine.coded)};
    return {x, {}};
  }

  // Queries, keys and values of the new tokens.
  void project(int64_t phase, const Layer& layer, const Own& mine) {
    const Weight* weights[3] = {&layer.queries, &layer.keys, &layer.values};
    int64_t ends[3], pieces = 0;
    for (int i = 0; i < 3; ++i) ends[i] = pieces += count_pieces(*weights[i], step_.threads);
    const Inputs inputs = prepare({weights[0], weights[1], weights[2]}, mine.normed, mine);
    team_.share(phase, pieces, [&](int64_t at) {
      const int which = at < ends[0] ? 0 : at < ends[1] ? 1 : 2;
      const Weight& weight = *weights[which];
      const int64_t rows = piece_rows(weight, step_.threads), first = (at - (which ? ends[which - 1] : 0)) * rows;
      const int64_t before = which == 0 ? 0 : model_.heads * (model_.group + which - 1) * model_.dim;
      multiply(weight, first, std::min(first + rows, weight.outputs), inputs, step_.sessions,
               shared_.projected + before + first, projected());
    });
  }

  void find_logits(int64_t phase, const Own& mine) {
    const Weight& weight = model_.head;
    const int64_t rows = piece_rows(weight, step_.threads);
    const Inputs inputs = prepare({&weight}, mine.normed, mine);
    team_.share(phase, count_pieces(weight, step_.threads), [&](int64_t at) {
      const int64_t first = at * rows;
      multiply(weight, first, std::min(first + rows, weight.outputs), inputs, step_.sessions,
               step_.logits + first, weight.outputs);
    });
  }

  // Adds products to the hidden state.
  void add(int64_t phase, const Weight& weight, const float* x, const Own& mine) {
    const int64_t rows = piece_rows(weight, step_.threads);
    const Inputs inputs = prepare({&weight}, x, mine);
    team_.share(phase, count_pieces(weight, step_.threads), [&](int64_t at) {
      const int64_t first = at * rows, last = std::min(first + rows, weight.outputs);
      multiply(weight, first, last, inputs, step_.sessions, mine.first, rows);
      for (int64_t b = 0; b < step_.sessions; ++b)
        for (int64_t i = first; i < last; ++i) shared_.x[b * model_.hidden + i] += mine.first[b * rows + i - first];
    });
  }

  // The MLP's inner numbers.
  void feed(int64_t phase, const Layer& layer, const Own& mine) {
    const int64_t rows = piece_rows(layer.gate, step_.threads);
    const Inputs inputs = prepare({&layer.gate, &layer.up}, mine.normed, mine);
    team_.share(phase, count_pieces(layer.gate, step_.threads), [&](int64_t at) {
      const int64_t first = at * rows, last = std::min(first + rows, layer.gate.outputs);
      multiply(layer.gate, first, last, inputs, step_.sessions, mine.first, rows);
      multiply(layer.up, first, last, inputs, step_.sessions, mine.second, rows);
      for (int64_t b = 0; b < step_.sessions; ++b)
        gate(mine.first + b * rows, mine.second + b * rows, last - first, shared_.inner + b * model_.inner + first);
    });
  }

  // Normalizes a head's numbers, where the model does, and turns them to the session's position.
  void turn(int64_t session, const float* norm, float* numbers) {
    const int64_t half = model_.rotated / 2;
    if (norm) normalize(numbers, norm, model_.dim, model_.head_epsilon, numbers);
    rotate(shared_.cosines + session * half, shared_.sines + session * half, numbers);
  }

  void rotate(const float* cosines, const float* sines, float* numbers) const {
    const int64_t half = model_.rotated / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float low = numbers[i], high = numbers[i + half];
      numbers[i] = low * cosines[i] - high * sines[i];
      numbers[i + half] = high * cosines[i] + low * sines[i];
    }
  }

  // Appends a head's row, and attends.
  void attend(int64_t index, int64_t session, int64_t head, const Own& mine) {
    const Layer& layer = model_.layers[index];
    const int64_t dim = model_.dim, group = model_.group, heads = model_.heads;
    const int64_t at = (index * step_.sessions + session) * heads + head;
    const int64_t start = step_.starts[at], length = step_.lengths[at];
    float* projected_here = shared_.projected + session * projected();
    float* key = projected_here + (heads * group + head) * dim;
    const float* value = key + heads * dim;
    turn(session, layer.key_norm, key);
    T* rows = (T*)step_.rows + (((session * model_.n_layers + index) * 2) * heads + head) * dim;
    append(key, (T*)step_.keys + (start + length) * dim, rows);
    append(value, (T*)step_.values + (start + length) * dim, rows + heads * dim);
    float* asked = projected_here + head * group * dim;
    for (int64_t g = 0; g < group; ++g) turn(session, layer.query_norm, asked + g * dim);
    for (int64_t i = 0; i < group * dim; ++i) {
      if (step_.queries) narrow(asked[i], (T*)step_.queries + at * group * dim + i);
      mine.queries[i] = asked[i] * model_.scale;
    }
    Searched stored = step_.stored[session];
    turn_queries(session, mine, stored);
    stored.keys += index * step_.layer_bytes;
    stored.values += index * step_.layer_bytes;
    stored.scales += index * heads * padded(stored.page_rows) * int64_t(sizeof(float));
    stored.coded += index * heads * padded(stored.page_rows) * count_quads(dim) * 4;
    stored.summaries += index * stored.levels * 2;
    const int64_t most = stored.rows ? stored.count : 0;
    const Head<T> one{
        (const T*)step_.keys + start * dim,
        (const T*)step_.values + start * dim,
        step_.row_positions + start,
        nullptr,
        &stored,
        stored.ranks + head * (step_.rotations / heads),
        step_.positions[session] + step_.layer_rotation * index,
        step_.rotations,
        head,
        length + 1,
        group,
        dim,
        most,
        stored.segments > 0,
    };
    int32_t* drawn = step_.drawn + at * (1 + step_.most) + 1;
    float* attended = shared_.attended + (session * heads + head) * group * dim;
    drawn[-1] = int32_t(attend_head<T>(one, mine.queries, attended, drawn, mine.head));
    std::fill(drawn + most, drawn + step_.most, -1);
  }

  // Turns a head's queries to the segments of a session's rows.
  void turn_queries(int64_t session, const Own& mine, Searched& stored) const {
    const int64_t dim = model_.dim, numbers = model_.group * dim;
    stored.turned = mine.turned;
    stored.segment_step = numbers;
    for (int64_t segment = 0; segment < stored.segments; ++segment) {
      float* turned = mine.turned + segment * numbers;
      const float* turn = turns(session, segment);
      std::copy(mine.queries, mine.queries + numbers, turned);
      for (int64_t g = 0; g < model_.group; ++g) rotate(turn, turn + model_.rotated / 2, turned + g * dim);
    }
  }

  void append(const float* numbers, T* row, T* copy) {
    for (int64_t i = 0; i < model_.dim; ++i) narrow(numbers[i], row + i);
    std::copy(row, row + model_.dim, copy);
  }

  Step& step_;
  const Model& model_;
  Team team_;
  Shared shared_;
  float* own_;
  int64_t own_size_;
};

}  // namespace

extern "C" {
__attribute__((visibility("default"))) void decode_float32(Step* step) { Decode<float>(*step).run(); }
__attribute__((visibility("default"))) void decode_bfloat16(Step* step) { Decode<uint16_t>(*step).run(); }
// Numbers that a step needs in `scratch`.
__attribute__((visibility("default"))) int64_t decode_scratch(const Step* step) { return Decode<float>::count(*step); }
// As `argument_bytes` of attend.cpp.
__attribute__((visibility("default"))) int64_t decode_bytes() {
  return sizeof(Step) + 1000 * sizeof(Model) + 1000000 * sizeof(Layer);
}
}
