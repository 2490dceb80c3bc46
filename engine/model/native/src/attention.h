// Attention over the paged cache, in place: tiles of queries against runs of keys with an online softmax (Milakov and
// Gimelshein 2018; Dao et al. 2022), partial results merged by their log-sum-exp.
#pragma once
#include <cmath>
#include <vector>

#include "plan.h"
#include "team.h"
#include "vectors.h"

namespace octavo {

constexpr int TILE = 64;  // queries (tokens times query heads of a KV head) of a unit
constexpr int RUN = 64;   // keys that one pass of the softmax takes

template <class T>
struct Layer {
    const T* query;
    int64_t query_stride;  // elements between two tokens
    const T* keys;
    const T* values;
    T* output;  // [tokens, heads, value_dim]
    int heads, kv_heads, key_dim, value_dim;
    float scale;  // includes log2(e): scores are powers of two
    int group() const { return heads / kv_heads; }
};

// As many keys as a vector has lanes, transposed: a score is then a sum that never has to be added across lanes.
// key_dim columns of floats; bfloat16 with AVX512_BF16: key_dim / 2 columns of pairs.
template <class T>
struct KeyTile {
    using Element = float;
    static int columns(int dim) { return dim; }
    static void read(const T* const* rows, int offset, int dim, Words* to) {
        for (int d = 0; d < dim; d += LANES) {
            Words lines[LANES];
            for (int i = 0; i < LANES; i++) lines[i] = reinterpret_cast<Words>(load(rows[i] + offset + d));
            transpose(lines, to + d);
        }
    }
    static Floats multiply(Floats sum, Words column, float query) {
        return sum + reinterpret_cast<Floats>(column) * query;
    }
};

// The values of one or two keys at a vector's dimensions, as a weight multiplies them. Weights replace the scores.
template <class T>
struct ValueTile {
    using Weight = float;
    static constexpr int KEYS = 1;
    static Words read(const T* const* rows, int d) { return reinterpret_cast<Words>(load(rows[0] + d)); }
    static void round(Floats*) {}
    static Floats multiply(Floats sum, Words line, float weight) {
        return sum + reinterpret_cast<Floats>(line) * weight;
    }
};

#if defined(__AVX512BF16__)
struct BrainPair {
    uint32_t bits;
};
template <>
struct KeyTile<bfloat16> {
    using Element = BrainPair;
    static int columns(int dim) { return dim / 2; }
    static void read(const bfloat16* const* rows, int offset, int dim, Words* to) {
        int d = 0;
        for (; d + 2 * LANES <= dim; d += 2 * LANES) {
            Words lines[LANES];
            for (int i = 0; i < LANES; i++) lines[i] = load_words(rows[i] + offset + d);
            transpose(lines, to + d / 2);
        }
        if (d == dim) return;
        Words lines[LANES] = {}, columns[LANES];  // sixteen dimensions are left
        for (int i = 0; i < LANES; i++) std::memcpy(&lines[i], rows[i] + offset + d, sizeof(Halves));
        transpose(lines, columns);
        std::memcpy(to + d / 2, columns, LANES / 2 * sizeof(Words));
    }
    static Floats multiply(Floats sum, Words column, BrainPair query) {
        __m512i pair = _mm512_set1_epi32(query.bits);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)column, (__m512bh)pair);
    }
};
template <>
struct ValueTile<bfloat16> {  // lines: 32 dimensions of one key beside those of the next; weights are rounded to pairs
    using Weight = BrainPair;
    static constexpr int KEYS = 2;
    static Words read(const bfloat16* const* rows, int d) {
        Halves first, second;
        std::memcpy(&first, rows[0] + d, sizeof first);
        std::memcpy(&second, rows[1] + d, sizeof second);
        return (Words)_mm512_cvtepu16_epi32((__m256i)first) | (Words)_mm512_cvtepu16_epi32((__m256i)second) << 16;
    }
    static void round(Floats* scores) {
        for (int v = 0; v < RUN / LANES; v++) {
            __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)scores[v]);
            std::memcpy((char*)scores + v * sizeof halves, &halves, sizeof halves);
        }
    }
    static Floats multiply(Floats sum, Words line, BrainPair weight) {
        return KeyTile<bfloat16>::multiply(sum, line, weight);
    }
};
#endif

inline void copy_query(const float* from, int dim, float* to) { std::memcpy(to, from, dim * sizeof(float)); }
inline void copy_query(const bfloat16* from, int dim, float* to) {
    for (int d = 0; d < dim; d++) to[d] = to_float(from[d]);
}
#if defined(__AVX512BF16__)
inline void copy_query(const bfloat16* from, int dim, BrainPair* to) { std::memcpy(to, from, dim * sizeof(bfloat16)); }
#endif

// Where a run of keys and their values lie, those of all heads side by side. Behind the last one stand zeros: nothing
// else of the cache may be looked at.
template <class T>
struct Places {
    const T* keys[RUN];
    const T* values[RUN];
    int count = 0;
};

// What one thread works with: one run of keys of one unit at a time. While it computes on one, it calls the next from
// memory, a few lines with every round of its loops: memory and arithmetic would take turns otherwise. Made once a step.
template <class T>
class Worker {
    using Keys = KeyTile<T>;
    using Values = ValueTile<T>;
    using Element = typename Keys::Element;
    using Weight = typename Values::Weight;
    // Queries and vectors of a value that are added up at once: their sums fill the registers.
    static constexpr int TALL = REGISTERS > 16 ? 4 : 6, WIDE = REGISTERS > 16 ? 4 : 2;
    static constexpr int PAUSE = 4;  // columns or lines from one call of memory to the next

   public:
    Worker(const Plan& plan, int kv_heads, int key_dim, int value_dim)
        : plan_(plan),
          columns_(Keys::columns(key_dim)),
          width_(value_dim / LANES),
          queries_(size_t(TILE) * kv_heads * columns_),
          sums_(size_t(TILE) * kv_heads * width_),
          bases_(size_t(TILE) * kv_heads),
          totals_(size_t(TILE) * kv_heads),
          tile_(size_t(RUN / LANES) * columns_),
          zeros_(size_t(kv_heads) * std::max(key_dim, value_dim)) {}

    void begin(const Layer<T>& layer) {
        layer_ = layer;
        now_.count = 0;
    }

    // `next`: what this thread does afterwards; may be null.
    void run(const Unit& unit, const Unit* next, float* scratch) {
        start(unit);
        for (int from = unit.from; from < unit.to; from += RUN) {
            if (!now_.count) find(now_, unit, from);
            look_ahead(unit, from + RUN, next);
            for (int i = 0; i < count_; i++) seen_[i] = std::min(ends_[i] - from, now_.count);
            for (head_ = 0; head_ < layer_.kv_heads; head_++) score();
            std::swap(now_, then_);
        }
        finish(unit, scratch);
    }

   private:
    static constexpr float RISE = 8;  // how far scores may exceed what they are relative to, as a power of two

    void start(const Unit& unit) {
        int group = layer_.group();
        count_ = unit.tokens * group;
        for (int i = 0; i < count_; i++) {
            int token = plan_.tokens[unit.first_token + i / group];
            ends_[i] = plan_.positions[token] + 1;
            for (int head = 0; head < layer_.kv_heads; head++)
                copy_query(layer_.query + token * layer_.query_stride + int64_t(head * group + i % group) * layer_.key_dim,
                           layer_.key_dim, queries_.data() + (head * TILE + i) * columns_);
        }
        for (int head = 0; head < layer_.kv_heads; head++) {
            int first = head * TILE;
            std::fill_n(bases_.begin() + first, count_, -INFINITY);
            std::fill_n(totals_.begin() + first, count_, Floats{});
            std::fill_n(sums_.begin() + first * width_, count_ * width_, Floats{});
        }
    }

    void find(Places<T>& places, const Unit& unit, int from) {
        int size = plan_.block_size;
        places.count = std::min(RUN, unit.to - from);
        for (int k = 0; k < places.count;) {
            int offset = (from + k) % size, left = std::min(size - offset, places.count - k);
            int64_t slot = int64_t(unit.blocks[(from + k) / size]) * size + offset;
            for (int end = k + left; k < end; k++, slot++) {
                places.keys[k] = layer_.keys + slot * layer_.kv_heads * layer_.key_dim;
                places.values[k] = layer_.values + slot * layer_.kv_heads * layer_.value_dim;
            }
        }
        for (int k = places.count; k < RUN; k++) places.keys[k] = places.values[k] = zeros_.data();
    }

    void look_ahead(const Unit& unit, int from, const Unit* next) {
        if (from < unit.to) find(then_, unit, from);
        else if (next) find(then_, *next, next->from);
        else then_.count = 0;
        called_ = 0;
        line_ = last_line_ = nullptr;
        int lines = then_.count * layer_.kv_heads * (layer_.key_dim + layer_.value_dim) * sizeof(T) / LINE;
        int vectors = (now_.count + LANES - 1) / LANES, multiplications = vectors * columns_ + lines_of(now_.count) * width_;
        int calls = count_ * multiplications / (12 * PAUSE);  // twelve or so at a time
        pace_ = lines / std::max(calls * layer_.kv_heads, 1) + 1;
    }

    // The next few lines of the next run.
    void call() {
        for (int i = 0; i < pace_; i++, line_ += LINE) {
            if (line_ >= last_line_) {
                if (called_ == 2 * then_.count) return;
                bool is_key = called_ < then_.count;
                line_ = (const char*)(is_key ? then_.keys[called_] : then_.values[called_ - then_.count]);
                last_line_ = line_ + layer_.kv_heads * (is_key ? layer_.key_dim : layer_.value_dim) * sizeof(T);
                called_++;
            }
            __builtin_prefetch(line_, 0, 2);
        }
    }

    // One head's part of a run.
    void score() {
        for (int v = 0; v * LANES < now_.count; v++)
            Keys::read(now_.keys + v * LANES, head_ * layer_.key_dim, layer_.key_dim, tile_.data() + v * columns_);
        int i = 0;
        for (; i + 6 <= count_; i += 6) products<6, 2>(i);
        for (; i + 3 <= count_; i += 3) products<3, 4>(i);
        for (; i < count_; i++) products<1, 4>(i);
        for (int i = 0; i < count_; i++) weigh(i);
        add_values();
    }

    // What the queries from `first` to `first + N` see of the run, at most.
    template <int N>
    int most_seen(int first) const {
        int most = 0;
        for (int i = 0; i < N; i++) most = std::max(most, seen_[first + i]);
        return most;
    }

    template <int N, int W>
    void products(int first) {
        const Element* queries = queries_.data() + (head_ * TILE + first) * columns_;
        for (int v = 0, vectors = (most_seen<N>(first) + LANES - 1) / LANES; v < vectors; v += W) {
            const Words* tile = tile_.data() + v * columns_;
            Floats sums[N][W];  // an initialiser would be a call of memset, and go through memory
            for (int i = 0; i < N; i++)
                for (int w = 0; w < W; w++) sums[i][w] = Floats{};
            for (int d = 0; d < columns_; d += PAUSE) {
                call();
                for (int at = d; at < d + PAUSE; at++)
                    for (int i = 0; i < N; i++)
                        for (int w = 0; w < W; w++)
                            sums[i][w] = Keys::multiply(sums[i][w], tile[w * columns_ + at], queries[i * columns_ + at]);
            }
            for (int i = 0; i < N; i++)
                for (int w = 0; w < W; w++) scores_[first + i][v + w] = sums[i][w] * layer_.scale;
        }
    }

    // Scores become weights relative to a base. It rises only where scores exceed it by far: sums need not be scaled down
    // with each greater score then.
    void weigh(int i) {
        Floats* scores = scores_[i];
        int vectors = std::max(seen_[i] + LANES - 1, 0) / LANES;
        if (seen_[i] < vectors * LANES) {
            Floats& last = scores[vectors - 1];
            last = numbers() < seen_[i] - (vectors - 1) * LANES ? last : splat(-INFINITY);
        }
        Floats highest = splat(-INFINITY);
        for (int v = 0; v < vectors; v++) highest = max(highest, scores[v]);
        int at = head_ * TILE + i;
        if (exceeds(highest, bases_[at] + RISE)) raise(at, greatest(highest));
        float base = bases_[at] == -INFINITY ? 0.0f : bases_[at];  // nothing seen yet: weights are 0, or NaN where a score is
        Floats total = totals_[at];
        for (int v = 0; v < vectors; v++) {
            scores[v] = exp2(scores[v] - base);
            total += scores[v];
        }
        totals_[at] = total;
        for (int v = vectors; v < RUN / LANES; v++) scores[v] = Floats{};
        Values::round(scores);
    }

    void raise(int at, float base) {
        if (bases_[at] > -INFINITY) {
            float shrink = std::exp2(bases_[at] - base);
            totals_[at] *= shrink;
            for (int d = 0; d < width_; d++) sums_[at * width_ + d] *= shrink;
        }
        bases_[at] = base;
    }

    void add_values() {
        if (count_ <= 3) add_columns<4, false>();  // not worth a copy: they are looked at where they lie
        else add_columns<WIDE, true>();
    }

    template <int N, bool COPIES>
    void add_columns() {
        int d = 0;
        for (; d + N * LANES <= layer_.value_dim; d += N * LANES) add_columns<N, COPIES>(d);
        for (; d < layer_.value_dim; d += LANES) add_columns<1, COPIES>(d);
    }

    template <int N, bool COPIES>
    void add_columns(int d) {
        int offset = head_ * layer_.value_dim + d;
        auto look = [&](int k, int v) { return Values::read(now_.values + k * Values::KEYS, offset + v * LANES); };
        if constexpr (COPIES) {
            for (int k = 0, lines = lines_of(now_.count); k < lines; k++)
                for (int v = 0; v < N; v++) lines_[k * N + v] = look(k, v);
            add_columns<N>(d, [&](int k, int v) { return lines_[k * N + v]; });
        } else {
            add_columns<N>(d, look);
        }
    }

    template <int N, class Line>
    void add_columns(int d, Line line) {
        int i = 0;
        for (; i + TALL <= count_; i += TALL) add_some<TALL, N>(i, d, line);
        for (; i + 3 <= count_; i += 3) add_some<3, N>(i, d, line);
        for (; i < count_; i++) add_some<1, N>(i, d, line);
    }

    // So many that nothing is left between calls: behind the last keys stand zeros, and their weights are 0.
    static int lines_of(int keys) {
        constexpr int KEYS = Values::KEYS * PAUSE;
        return (keys + KEYS - 1) / KEYS * PAUSE;
    }

    template <int M, int N, class Line>
    void add_some(int first, int d, Line line) {
        Floats sums[M][N];
        Floats* to = sums_.data() + (head_ * TILE + first) * width_ + d / LANES;
        for (int i = 0; i < M; i++)
            for (int v = 0; v < N; v++) sums[i][v] = to[i * width_ + v];
        for (int k = 0, lines = lines_of(most_seen<M>(first)); k < lines; k += PAUSE) {
            call();
            for (int at = k; at < k + PAUSE; at++) {
                Words words[N];
                for (int v = 0; v < N; v++) words[v] = line(at, v);
                for (int i = 0; i < M; i++) {
                    Weight weight;
                    std::memcpy(&weight, (const char*)scores_[first + i] + at * sizeof weight, sizeof weight);
                    for (int v = 0; v < N; v++) sums[i][v] = Values::multiply(sums[i][v], words[v], weight);
                }
            }
        }
        for (int i = 0; i < M; i++)
            for (int v = 0; v < N; v++) to[i * width_ + v] = sums[i][v];
    }

    void finish(const Unit& unit, float* scratch) {
        int group = layer_.group();
        for (int i = 0; i < count_; i++)
            for (int kv_head = 0; kv_head < layer_.kv_heads; kv_head++) {
                int at = kv_head * TILE + i, head = kv_head * group + i % group;
                const Floats* sums = sums_.data() + at * width_;
                float total = sum(totals_[at]);
                if (unit.partial < 0) {
                    int token = plan_.tokens[unit.first_token + i / group];
                    T* to = layer_.output + (int64_t(token) * layer_.heads + head) * layer_.value_dim;
                    for (int d = 0; d < width_; d++) store(to + d * LANES, sums[d] * (1 / total));
                } else {
                    float* to = scratch + (int64_t(unit.partial + i / group) * layer_.heads + head) * (layer_.value_dim + LANES);
                    for (int d = 0; d < width_; d++) store(to + d * LANES, sums[d]);
                    to[layer_.value_dim] = bases_[at];
                    to[layer_.value_dim + 1] = total;
                }
            }
    }

    const Plan& plan_;
    Layer<T> layer_ = {};
    int columns_, width_, count_ = 0, head_ = 0;
    std::vector<Element> queries_;  // this and the next three: [kv_heads, TILE, ...]
    std::vector<Floats> sums_;
    std::vector<float> bases_;
    std::vector<Floats> totals_;
    std::vector<Words> tile_;
    std::vector<T> zeros_;
    Places<T> now_, then_;
    int called_ = 0, pace_ = 1;  // rows of `then_` that were called
    const char* line_ = nullptr;
    const char* last_line_ = nullptr;
    Words lines_[RUN * 4];
    Floats scores_[TILE][RUN / LANES];  // then weights, as values are multiplied with
    int ends_[TILE], seen_[TILE];
};

// Partial results of one token and head, weighed by their sums relative to the greatest base.
template <class T>
void merge(Plan& plan, const Layer<T>& layer, int token, int head) {
    int size = layer.value_dim, stride = size + LANES;
    auto part = [&](int32_t index) { return plan.scratch.data() + (int64_t(index) * layer.heads + head) * stride; };
    float peak = -INFINITY, total = 0;
    for (int32_t index : plan.parts[token]) peak = std::max(peak, part(index)[size]);
    for (int32_t index : plan.parts[token]) {
        float& weight = part(index)[size];
        weight = std::exp2(weight - peak);
        total += part(index)[size + 1] * weight;
    }
    T* to = layer.output + (int64_t(token) * layer.heads + head) * size;
    for (int d = 0; d < size; d += LANES) {
        Floats sum = {};
        for (int32_t index : plan.parts[token]) sum += load(part(index) + d) * part(index)[size];
        store(to + d, sum * (1 / total));
    }
}

// To be called before a team begins.
inline void prepare(Plan& plan, int heads, int value_dim) {
    plan.scratch.resize(int64_t(plan.partials) * heads * (value_dim + LANES));
}

// Called by all threads of a team.
template <class T>
void attend(Team& team, Plan& plan, const Layer<T>& layer, Worker<T>& worker) {
    worker.begin(layer);
    team.take_ahead(plan.units.size(), [&](int64_t unit, int64_t next) {  // all heads by one thread: they lie side by side
        worker.run(plan.units[unit], next < 0 ? nullptr : &plan.units[next], plan.scratch.data());
    });
    if (!plan.partials) return;
    team.split(plan.positions.size(), [&](int64_t token) {
        if (!plan.parts[token].empty())
            for (int head = 0; head < layer.heads; head++) merge(plan, layer, token, head);
    });
}

}  // namespace octavo
