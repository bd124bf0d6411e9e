// A whole decode step of a model: one new token of each session, from its number to the next one's logits.
//
// RMSNorm, products of weights (products.h), rotary embedding, attention (head.h) or a delta net (delta.h), gated MLP,
// over the memory of the slots and of the row store's pages. Weights are read once for all sessions. A number is
// computed by one thread in one order, which neither the number of threads nor the other sessions change.
#include "delta.h"
#include "head.h"
#include "products.h"
#include "team.h"

#include <chrono>

// As `Layer` of layer.py.
struct Layer {
  const Delta* delta;           // in place of attention; or none
  Weight queries;               // with gates of the outputs, [heads, group, 2, dim] numbers; else [heads, group, dim]
  Weight keys, values, out, gate, up, down;
  const float* mixer_norm;      // [hidden]
  const float* mlp_norm;        // [hidden]
  const float* query_norm;      // [dim], or none
  const float* key_norm;        // as query_norm
};

// As `Model` of model.py.
struct Model {
  const Layer* layers;
  int64_t n_layers;
  int64_t row_layers;        // those of attention, which have rows
  int64_t gated;             // 1: queries come with gates
  DeltaShape delta;          // zeros without delta nets
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
  const int64_t* starts;     // of each head's rows in the slots, [row_layers, sessions, heads]
  const int64_t* lengths;    // rows before the new one, as starts
  void* keys;                // of the slots, [rows, dim]
  void* values;              // as keys
  const int32_t* row_positions;  // [rows]; the new rows' are set
  void* rows;                // the new rows once more, [sessions, row_layers, 2, heads, dim]
  void* queries;             // with rotary embedding, [row_layers, sessions, heads, group, dim]; or none
  float* logits;             // [sessions, vocabulary]
  int32_t* drawn;            // [row_layers, sessions, heads, 1 + most]: as those of `Call`
  int64_t most;              // the largest `count`
  int64_t sessions;
  const DeltaStates* states;  // of each delta net
  float* scratch;            // `decode_scratch` numbers
  int64_t threads;
  int64_t attention_ns;      // set to the time that attention took
};

namespace {

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
                               {&shared_.projected, projected(model_)},
                               {&shared_.attended, attended(model_)},
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
    int64_t shared = 0;
    for (int64_t numbers : {model.hidden, model.rotated / 2, model.rotated / 2, projected(model), attended(model),
                            model.inner, most_segments(step) * model.rotated})
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
    const int64_t most = std::max({model.hidden, model.inner, attended(model)});
    return Coded::count(step.sessions, most);
  }

  static int64_t count_own(const Step& step) {
    const Model& model = *step.model;
    int64_t head = count_scratch(model.delta);
    for (int64_t b = 0; b < step.sessions; ++b) {
      int64_t longest = 0;
      for (int64_t l = 0; l < model.row_layers; ++l)
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

  // Numbers of a session's hidden state as a layer projects it: queries, maybe with gates, keys and values.
  static int64_t projected(const Model& model) {
    return std::max(model.heads * ((1 + model.gated) * model.group + 2) * model.dim, count_projected(model.delta));
  }

  // Numbers of a session that a layer's last product is of.
  static int64_t attended(const Model& model) {
    return std::max(model.heads * model.group * model.dim, model.delta.value_heads * model.delta.value_dim);
  }

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
    int64_t phase = 0, rows = 0, states = 0;
    for (int64_t index = 0; index < model_.n_layers; ++index) {
      const Layer& layer = model_.layers[index];
      normalize_all(layer.mixer_norm, mine);
      if (layer.delta)
        recur_all(phase, *layer.delta, step_.states[states++], mine);
      else
        attend_all(phase, layer, rows++, thread, mine);
      phase += 2;
      add(phase++, layer.delta ? layer.delta->out : layer.out, shared_.attended, mine);
      normalize_all(layer.mlp_norm, mine);
      feed(phase++, layer, mine);
      add(phase++, layer.down, shared_.inner, mine);
    }
    normalize_all(model_.norm, mine);
    find_logits(phase, mine);
  }

  void attend_all(int64_t phase, const Layer& layer, int64_t index, int64_t thread, const Own& mine) {
    project(phase, {&layer.queries, &layer.keys, &layer.values}, mine);
    const auto began = std::chrono::steady_clock::now();
    team_.share(phase + 1, step_.sessions * model_.heads,
                [&](int64_t i) { attend(layer, index, i / model_.heads, i % model_.heads, mine); });
    if (thread == 0)
      step_.attention_ns +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
  }

  void recur_all(int64_t phase, const Delta& layer, const DeltaStates& states, const Own& mine) {
    const int64_t heads = model_.delta.key_heads, numbers = projected(model_);
    project(phase, {&layer.mixed, &layer.gates, &layer.strengths, &layer.decays}, mine);
    team_.share(phase + 1, step_.sessions * heads, [&](int64_t i) {
      const int64_t session = i / heads;
      recur(layer, model_.delta, states, session, i % heads, shared_.projected + session * numbers,
            shared_.attended + session * layer.out.inputs, mine.head);
    });
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

  // Products of some weights with the new tokens' hidden states, one behind the other.
  void project(int64_t phase, std::initializer_list<const Weight*> weights, const Own& mine) {
    int64_t pieces = 0;
    for (const Weight* weight : weights) pieces += count_pieces(*weight, step_.threads);
    const Inputs inputs = prepare(weights, mine.normed, mine);
    team_.share(phase, pieces, [&](int64_t piece) {
      const Weight* const* which = weights.begin();
      int64_t before = 0;
      for (int64_t own; piece >= (own = count_pieces(**which, step_.threads)); ++which) {
        piece -= own;
        before += (*which)->outputs;
      }
      const Weight& weight = **which;
      const int64_t rows = piece_rows(weight, step_.threads), first = piece * rows;
      multiply(weight, first, std::min(first + rows, weight.outputs), inputs, step_.sessions,
               shared_.projected + before + first, projected(model_));
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
  void attend(const Layer& layer, int64_t index, int64_t session, int64_t head, const Own& mine) {
    const int64_t dim = model_.dim, group = model_.group, heads = model_.heads;
    const int64_t stride = (1 + model_.gated) * dim;  // from a query to the next
    const int64_t at = (index * step_.sessions + session) * heads + head;
    const int64_t start = step_.starts[at], length = step_.lengths[at];
    float* projected_here = shared_.projected + session * projected(model_);
    float* key = projected_here + heads * group * stride + head * dim;
    const float* value = key + heads * dim;
    turn(session, layer.key_norm, key);
    T* rows = (T*)step_.rows + (((session * model_.row_layers + index) * 2) * heads + head) * dim;
    append(key, (T*)step_.keys + (start + length) * dim, rows);
    append(value, (T*)step_.values + (start + length) * dim, rows + heads * dim);
    float* asked = projected_here + head * group * stride;
    for (int64_t g = 0; g < group; ++g) {
      float* query = asked + g * stride;
      turn(session, layer.query_norm, query);
      for (int64_t i = 0; i < dim; ++i) {
        if (step_.queries) narrow(query[i], (T*)step_.queries + (at * group + g) * dim + i);
        mine.queries[g * dim + i] = query[i] * model_.scale;
      }
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
    for (int64_t g = 0; model_.gated && g < group; ++g)
      for (int64_t i = 0; i < dim; ++i) attended[g * dim + i] *= sigmoid(asked[g * stride + dim + i]);
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
  return sizeof(Step) + 1000 * sizeof(Model) + 1000000 * sizeof(Layer) + 1000000000 * int64_t(sizeof(Delta));
}
}
