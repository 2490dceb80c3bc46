// What sampling reads of scores: the maxima of blocks, the mass of a row, and where a draw falls.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "team.h"
#include "vectors.h"

namespace octavo {

constexpr int PEAK = 64;    // scores with one maximum: BLOCK in octavo.engine.model.peaks
constexpr int CHUNK = 256;  // weights that are added up in float32 before they go on in double

struct Scores {
    const float* from;
    int64_t stride, size;  // elements between two rows; scores of a row
    const float* row(int64_t i) const { return from + i * stride; }
    int64_t chunks() const { return (size + CHUNK - 1) / CHUNK; }
    int64_t peaks() const { return (size + PEAK - 1) / PEAK; }
};

inline Floats load_scores(const float* from, int64_t left) {
    if (left >= LANES) return load(from);
    alignas(64) float all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = i < left ? from[i] : -INFINITY;
    return load(all);
}

// NaN where there is one.
inline float greatest_of(const float* from, int64_t count) {
    Floats highest = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        Floats x = load_scores(from + i, count - i);
        Ints taken = (x > highest) | (x != x);
        highest = taken ? x : highest;
    }
    return has_nan(highest) ? NAN : greatest(highest);
}

// Weights, exp((score - best) / temperature): the best has 1, and no temperature is so small that others overflow.
struct Weights {
    float best, factor;
    Weights(float best, float temperature)
        : best(best), factor(std::min(LOG2E / temperature, std::numeric_limits<float>::max())) {}
    Floats of(Floats scores) const { return exp2((scores - best) * factor); }
    double sum_of(const float* from, int64_t count) const {
        Floats total = {};
        for (int64_t i = 0; i < count; i += LANES) total += of(load_scores(from + i, count - i));
        return sum(total);
    }
};

// What is found in each row.
struct Survey {
    float* maxima;  // [rows, peaks]
    float* bests;   // [rows]: the greatest score
    int64_t* ids;   // [rows]: where it is first; anywhere where it is NaN
    float* masses;  // [rows]: log(sum(exp(score - best))); null: not asked for
};

inline void survey(Team& team, const Scores& scores, int64_t rows, const Survey& to) {
    team.take(rows, [&](int64_t i) {
        const float* row = scores.row(i);
        float* found = to.maxima + i * scores.peaks();
        float best = -INFINITY;
        int64_t at = 0;
        for (int64_t p = 0; p < scores.peaks(); p++) {
            found[p] = greatest_of(row + p * PEAK, std::min<int64_t>(PEAK, scores.size - p * PEAK));
            if (found[p] > best || found[p] != found[p]) best = found[p], at = p * PEAK;
        }
        to.bests[i] = best;
        to.ids[i] = std::find(row + at, row + std::min(at + PEAK - 1, scores.size - 1), best) - row;
        if (!to.masses) return;
        const Weights weights(best, 1.0f);
        double mass = 0;
        for (int64_t at = 0; at < scores.size; at += CHUNK)
            mass += weights.sum_of(row + at, std::min<int64_t>(CHUNK, scores.size - at));
        to.masses[i] = float(std::log(mass));
    });
}

// Where in the weights of a chunk `rest` falls; the last one above 0 where that is beyond all of them.
inline int64_t place(const float* from, int64_t count, const Weights& weights, double rest) {
    alignas(64) float all[CHUNK];
    for (int64_t i = 0; i < count; i += LANES) store(all + i, weights.of(load_scores(from + i, count - i)));
    double upto = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        upto += all[i];
        if (upto > rest) return i;
        if (all[i] > 0) last = i;
    }
    return last;
}

struct Draws {
    const int64_t* rows;         // [count]: which rows of the scores
    const float* bests;          // [count]: the greatest score of each
    const float* temperatures;   // [count]
    const double* uniforms;      // [count, each], below 1
    int64_t count, each;
    double* masses;  // [count]: the sum of the weights
    int64_t* ids;    // [count, each]: where in their cumulative sum each uniform falls
};

// sums: room for scores.chunks() + 1 of each thread.
inline void draw(Team& team, const Scores& scores, const Draws& draws, double* sums) {
    double* upto = sums + team.index() * (scores.chunks() + 1);
    team.take(draws.count, [&](int64_t i) {
        const float* row = scores.row(draws.rows[i]);
        const Weights weights(draws.bests[i], draws.temperatures[i]);
        auto left = [&](int64_t chunk) { return std::min<int64_t>(CHUNK, scores.size - chunk * CHUNK); };
        upto[0] = 0;
        for (int64_t c = 0; c < scores.chunks(); c++)
            upto[c + 1] = upto[c] + weights.sum_of(row + c * CHUNK, left(c));
        draws.masses[i] = upto[scores.chunks()];
        for (int64_t d = 0; d < draws.each; d++) {
            // a uniform is at most 1 - 2^-53, so its product with the mass rounds to less: there is a chunk for it
            double target = draws.uniforms[i * draws.each + d] * draws.masses[i];
            int64_t c = std::upper_bound(upto, upto + scores.chunks() + 1, target) - upto - 1;
            c = std::min(c, scores.chunks() - 1);  // of a row that has no mass at all
            draws.ids[i * draws.each + d] = c * CHUNK + place(row + c * CHUNK, left(c), weights, target - upto[c]);
        }
    });
}

}  // namespace octavo
