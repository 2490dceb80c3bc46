// Attention over the paged cache, in place: tiles of queries against runs of keys with an online softmax (Milakov and
// Gimelshein 2018; Dao et al. 2022), partial results merged by their log-sum-exp.
#pragma once
#include <cmath>
#include <vector>

#include "plan.h"
#include "team.h"
#include "vectors.h"

namespace octavo {

constexpr int TILE = 32;  // queries (tokens times query heads of a KV head) of a unit
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

// Sixteen keys, transposed: a score is then a sum over lanes that never has to be added across.
// float32: key_dim columns of sixteen floats. bfloat16 with AVX512_BF16: key_dim / 2 columns of sixteen pairs.
template <class T>
struct KeyTile;

template <>
struct KeyTile<float> {
    using Element = float;
    static int columns(int dim) { return dim; }
    static void read(const float* const* rows, int dim, Words* to) {
        for (int d = 0; d < dim; d += LANES) {
            Words lines[LANES];
            for (int i = 0; i < LANES; i++) std::memcpy(&lines[i], rows[i] + d, sizeof(Words));
            transpose(lines, to + d);
        }
    }
    static Floats multiply(Floats sum, Words column, float query) {
        return sum + reinterpret_cast<Floats>(column) * query;
    }
};

// The values of one or two keys at sixteen dimensions, as a weight multiplies them.
template <class T>
struct ValueTile {
    using Weight = float;
    static constexpr int KEYS = 1;
    static void read(const T* const* rows, int d, Words* to) { *to = reinterpret_cast<Words>(load(rows[0] + d)); }
    static void round(const Floats* scores, float* to) { std::memcpy(to, scores, RUN * sizeof(float)); }
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
    static void read(const bfloat16* const* rows, int dim, Words* to) {
        int d = 0;
        for (; d + 2 * LANES <= dim; d += 2 * LANES) {
            Words lines[LANES];
            for (int i = 0; i < LANES; i++) std::memcpy(&lines[i], rows[i] + d, sizeof(Words));
            transpose(lines, to + d / 2);
        }
        if (d == dim) return;
        Words lines[LANES] = {}, columns[LANES];  // sixteen dimensions are left
        for (int i = 0; i < LANES; i++) std::memcpy(&lines[i], rows[i] + d, sizeof(Halves));
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
    static void read(const bfloat16* const* rows, int d, Words* to) {
        Halves first, second;
        std::memcpy(&first, rows[0] + d, sizeof first);
        std::memcpy(&second, rows[1] + d, sizeof second);
        *to = (Words)_mm512_cvtepu16_epi32((__m256i)first) | (Words)_mm512_cvtepu16_epi32((__m256i)second) << 16;
    }
    static void round(const Floats* scores, BrainPair* to) {
        for (int v = 0; v < RUN / LANES; v++) {
            __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)scores[v]);
            std::memcpy(to + v * LANES / 2, &halves, sizeof halves);
        }
    }
    static Floats multiply(Floats sum, Words line, BrainPair weight) {
        return KeyTile<bfloat16>::multiply(sum, line, weight);
    }
};
#else
template <>
struct KeyTile<bfloat16> {
    using Element = float;
    static int columns(int dim) { return dim; }
    static void read(const bfloat16* const* rows, int dim, Words* to) {
        for (int d = 0; d < dim; d += LANES) {
            Words lines[LANES];
            for (int i = 0; i < LANES; i++) lines[i] = reinterpret_cast<Words>(load(rows[i] + d));
            transpose(lines, to + d);
        }
    }
    static Floats multiply(Floats sum, Words column, float query) {
        return sum + reinterpret_cast<Floats>(column) * query;
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

// What one thread works with: one unit of one KV head at a time. Made once a step.
template <class T>
class Worker {
    using Keys = KeyTile<T>;
    using Values = ValueTile<T>;
    using Element = typename Keys::Element;

   public:
    Worker(Plan& plan, int key_dim, int value_dim)
        : plan_(plan),
          columns_(Keys::columns(key_dim)),
          queries_(size_t(TILE) * columns_),
          tile_(size_t(RUN / LANES) * columns_),
          sums_(size_t(TILE) * value_dim / LANES),
          zeros_(std::max(key_dim, value_dim)) {}

    void run(const Layer<T>& layer, const Unit& unit, int kv_head) {
        layer_ = layer;
        int group = layer_.group();
        count_ = unit.tokens * group;
        for (int t = 0; t < unit.tokens; t++)
            for (int g = 0; g < group; g++)
                copy_query(layer_.query + plan_.tokens[unit.first_token + t] * layer_.query_stride +
                               int64_t(kv_head * group + g) * layer_.key_dim,
                           layer_.key_dim, queries_.data() + (t * group + g) * columns_);
        std::fill(sums_.begin(), sums_.begin() + count_ * layer_.value_dim / LANES, Floats{});
        for (int i = 0; i < count_; i++) peaks_[i] = -INFINITY, totals_[i] = 0;
        for (int from = unit.from; from < unit.to; from += RUN)
            score(unit, kv_head, from, std::min(RUN, unit.to - from));
        finish(unit, kv_head);
    }

   private:
    void score(const Unit& unit, int kv_head, int from, int count) {
        find(unit, kv_head, from, count);
        int vectors = (count + LANES - 1) / LANES;
        for (int v = 0; v < vectors; v++)
            Keys::read(keys_ + v * LANES, layer_.key_dim, tile_.data() + v * columns_);
        int i = 0;
        for (; i + 6 <= count_; i += 6) products<6>(i, vectors);
        for (; i + 3 <= count_; i += 3) products<3>(i, vectors);
        for (; i < count_; i++) products<1>(i, vectors);
        int group = layer_.group();
        for (int i = 0; i < count_; i++) {
            int seen = plan_.positions[plan_.tokens[unit.first_token + i / group]] + 1 - from;
            weigh(i, std::min(seen, count), vectors);
        }
        add_values(count);
    }

    // Where the keys and values lie. Behind the last one stand zeros: nothing else of the cache may be looked at.
    void find(const Unit& unit, int kv_head, int from, int count) {
        int size = plan_.block_size;
        for (int k = 0; k < count;) {
            int offset = (from + k) % size, left = std::min(size - offset, count - k);
            int64_t slot = int64_t(unit.blocks[(from + k) / size]) * size + offset;
            for (int end = k + left; k < end; k++, slot++) {
                keys_[k] = layer_.keys + (slot * layer_.kv_heads + kv_head) * layer_.key_dim;
                values_[k] = layer_.values + (slot * layer_.kv_heads + kv_head) * layer_.value_dim;
            }
        }
        for (int k = count; k < RUN; k++) keys_[k] = values_[k] = zeros_.data();
    }

    template <int N>
    void products(int first, int vectors) {
        const Element* queries = queries_.data() + first * columns_;
        for (int v = 0; v < vectors; v += 2) {
            const Words* left = tile_.data() + v * columns_;
            const Words* right = v + 1 < vectors ? left + columns_ : left;
            Floats sums[N][2] = {};
            for (int d = 0; d < columns_; d++)
                for (int i = 0; i < N; i++) {
                    sums[i][0] = Keys::multiply(sums[i][0], left[d], queries[i * columns_ + d]);
                    sums[i][1] = Keys::multiply(sums[i][1], right[d], queries[i * columns_ + d]);
                }
            for (int i = 0; i < N; i++) {
                scores_[first + i][v] = sums[i][0] * layer_.scale;
                if (v + 1 < vectors) scores_[first + i][v + 1] = sums[i][1] * layer_.scale;
            }
        }
    }

    // Scores become weights relative to the greatest so far; what was summed before is scaled down to it.
    void weigh(int i, int seen, int vectors) {
        Floats* scores = scores_[i];
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats highest = splat(-INFINITY);
        for (int v = 0; v < vectors; v++) {
            if (seen < (v + 1) * LANES) scores[v] = lanes < seen - v * LANES ? scores[v] : splat(-INFINITY);
            highest = max(highest, scores[v]);
        }
        float peak = std::max(peaks_[i], greatest(highest));
        float base = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: weights are 0, or NaN where a score is
        Floats total = {};
        for (int v = 0; v < vectors; v++) {
            scores[v] = exp2(scores[v] - base);
            total += scores[v];
        }
        for (int v = vectors; v < RUN / LANES; v++) scores[v] = Floats{};
        if (peak > peaks_[i]) {
            float shrink = std::exp2(peaks_[i] - peak);
            totals_[i] *= shrink;
            Floats* sums = sums_.data() + i * layer_.value_dim / LANES;
            for (int d = 0; d < layer_.value_dim / LANES; d++) sums[d] *= shrink;
            peaks_[i] = peak;
        }
        totals_[i] += sum(total);
        Values::round(scores, weights_[i]);
    }

    void add_values(int count) {
        for (int d = 0; d < layer_.value_dim; d += 4 * LANES) {
            int vectors = std::min(4, (layer_.value_dim - d) / LANES);
            if (vectors == 4) add_columns<4>(d, count);
            else for (int v = 0; v < vectors; v++) add_columns<1>(d + v * LANES, count);
        }
    }

    template <int N>
    void add_columns(int d, int count) {
        int lines = (count + Values::KEYS - 1) / Values::KEYS, i = 0;
        for (int k = 0; k < lines; k++)
            for (int v = 0; v < N; v++)
                Values::read(values_ + k * Values::KEYS, d + v * LANES, &lines_[k * N + v]);
        for (; i + 4 <= count_; i += 4) add_some<4, N>(i, d, lines);
        for (; i + 3 <= count_; i += 3) add_some<3, N>(i, d, lines);
        for (; i < count_; i++) add_some<1, N>(i, d, lines);
    }

    template <int M, int N>
    void add_some(int first, int d, int lines) {
        Floats sums[M][N];
        int width = layer_.value_dim / LANES;
        Floats* to = sums_.data() + first * width + d / LANES;
        for (int i = 0; i < M; i++)
            for (int v = 0; v < N; v++) sums[i][v] = to[i * width + v];
        for (int k = 0; k < lines; k++)
            for (int v = 0; v < N; v++)
                for (int i = 0; i < M; i++)
                    sums[i][v] = Values::multiply(sums[i][v], lines_[k * N + v], weights_[first + i][k]);
        for (int i = 0; i < M; i++)
            for (int v = 0; v < N; v++) to[i * width + v] = sums[i][v];
    }

    void finish(const Unit& unit, int kv_head) {
        int group = layer_.group(), width = layer_.value_dim / LANES;
        for (int i = 0; i < count_; i++) {
            int token = plan_.tokens[unit.first_token + i / group], head = kv_head * group + i % group;
            const Floats* sums = sums_.data() + i * width;
            if (unit.partial < 0) {
                T* to = layer_.output + (int64_t(token) * layer_.heads + head) * layer_.value_dim;
                for (int d = 0; d < width; d++) store(to + d * LANES, sums[d] * (1 / totals_[i]));
            } else {
                float* to = plan_.scratch.data() + (int64_t(unit.partial + i / group) * layer_.heads + head) * (layer_.value_dim + LANES);
                for (int d = 0; d < width; d++) store(to + d * LANES, sums[d]);
                to[layer_.value_dim] = peaks_[i];
                to[layer_.value_dim + 1] = totals_[i];
            }
        }
    }

    Plan& plan_;
    Layer<T> layer_ = {};
    int columns_, count_ = 0;
    std::vector<Element> queries_;
    std::vector<Words> tile_;
    std::vector<Floats> sums_;
    std::vector<T> zeros_;
    const T* keys_[RUN];
    const T* values_[RUN];
    Words lines_[RUN * 4];
    Floats scores_[TILE][RUN / LANES];
    typename Values::Weight weights_[TILE][RUN / Values::KEYS];
    float peaks_[TILE], totals_[TILE];
};

template <class T>
void merge(const Plan& plan, const Layer<T>& layer, int token, int head) {
    int stride = layer.value_dim + LANES;
    auto part = [&](int32_t index) { return plan.scratch.data() + (int64_t(index) * layer.heads + head) * stride; };
    float peak = -INFINITY, total = 0;
    for (int32_t index : plan.parts[token]) peak = std::max(peak, part(index)[layer.value_dim]);
    for (int32_t index : plan.parts[token])
        total += part(index)[layer.value_dim + 1] * std::exp2(part(index)[layer.value_dim] - peak);
    T* to = layer.output + (int64_t(token) * layer.heads + head) * layer.value_dim;
    for (int d = 0; d < layer.value_dim; d += LANES) {
        Floats sum = {};
        for (int32_t index : plan.parts[token])
            sum += load(part(index) + d) * (std::exp2(part(index)[layer.value_dim] - peak) / total);
        store(to + d, sum);
    }
}

// To be called before a team begins.
inline void prepare(Plan& plan, int heads, int value_dim) {
    plan.scratch.resize(int64_t(plan.partials) * heads * (value_dim + LANES));
}

// Called by all threads of a team.
template <class T>
void attend(Team& team, Plan& plan, const Layer<T>& layer, Worker<T>& worker) {
    team.take(plan.units.size(), [&](int64_t unit) {  // all heads by one thread: they lie side by side
        for (int head = 0; head < layer.kv_heads; head++) worker.run(layer, plan.units[unit], head);
    });
    if (!plan.partials) return;
    team.split(plan.positions.size(), [&](int64_t token) {
        if (!plan.parts[token].empty())
            for (int head = 0; head < layer.heads; head++) merge(plan, layer, token, head);
    });
}

}  // namespace octavo
