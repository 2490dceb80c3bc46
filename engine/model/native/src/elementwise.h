// What stands between the matrix products: norms, gates, position encoding.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vectors.h"

namespace octavo {

// Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, rounded to T before the weight, as Transformers does.
template <class T>
struct Norm {
    const T* weight;  // null: there is none
    float eps;
};

template <class T>
void norm_row(T* to, const T* from, const Norm<T>& norm, int64_t size) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats x = load_first(from + i, size - i);
        squares += x * x;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / size + norm.eps);
    for (int64_t i = 0; i < size; i += LANES) {
        Floats scaled = rounded<T>(load_first(from + i, size - i) * scale);
        store_first(to + i, scaled * load_first(norm.weight + i, size - i), size - i);
    }
}

template <class T>
void rms_norm(Team& team, T* to, const T* from, int64_t stride, const Norm<T>& norm, int64_t rows, int64_t size) {
    team.split(rows, [&](int64_t row) { norm_row(to + row * size, from + row * stride, norm, size); });
}

// silu(gate) * up, the first `size` of a row.
template <class T>
void silu_mul(T* to, const T* gates, const T* ups, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        Floats gate = load_first(gates + i, size - i), up = load_first(ups + i, size - i);
        gate = gate < splat(-87.0f) ? splat(-87.0f) : gate;  // from there down nothing is left
        Floats opened = rounded<T>(gate / (exp2(gate * -LOG2E) + 1.0f));
        store_first(to + i, opened * up, size - i);
    }
}

// For rows of [gate, up].
template <class T>
void silu_mul(Team& team, T* to, const T* from, int64_t rows, int64_t size) {
    constexpr int64_t PIECE = 8 * LANES;  // a single row, too, is shared
    int64_t pieces = (size + PIECE - 1) / PIECE;
    team.split(rows * pieces, [&](int64_t piece) {
        int64_t row = piece / pieces, i = piece % pieces * PIECE;
        const T* gates = from + row * 2 * size + i;
        silu_mul(to + row * size + i, gates, gates + size, std::min(size - i, PIECE));
    });
}

// x[i] * cos[i] -/+ x[i + half] * sin[i] on the first `turned` dimensions of a head (Su et al. 2021, in Transformers' halves).
template <class T>
void rotate(T* head, const T* cos, const T* sin, int turned) {
    int half = turned / 2;
    for (int i = 0; i < half; i += LANES) {
        int count = half - i < LANES ? half - i : LANES;
        auto read = [&](const T* from) { return load_first(from, count); };
        Floats low = read(head + i), high = read(head + half + i);
        // products are rounded one by one, as Transformers' own are
        Floats first = rounded<T>(low * read(cos + i)) + rounded<T>(-high * read(sin + i));
        Floats second = rounded<T>(high * read(cos + half + i)) + rounded<T>(low * read(sin + half + i));
        store_first(head + i, first, count);
        store_first(head + half + i, second, count);
    }
}

template <class T>
struct Projected {
    T* packed;  // [tokens, heads + 2 * kv_heads, dim]: queries, keys, values
    int64_t stride;
    const T* cos;  // [tokens, turned]; null: no position encoding
    const T* sin;
    const int64_t* slots;
    T* keys;
    T* values;
    int64_t tokens;
    int heads, kv_heads, dim, turned;
    Norm<T> query_norm, key_norm;  // of each head, before it is rotated
};

// Norm and rotate queries and keys in place; write keys and values to their slots.
template <class T>
void rotate_store(Team& team, const Projected<T>& step) {
    int64_t width = int64_t(step.kv_heads) * step.dim;
    team.split(step.tokens, [&](int64_t t) {
        T* row = step.packed + t * step.stride;
        for (int head = 0; head < step.heads + step.kv_heads; head++) {
            const Norm<T>& norm = head < step.heads ? step.query_norm : step.key_norm;
            if (norm.weight) norm_row(row + head * step.dim, row + head * step.dim, norm, step.dim);
        }
        if (step.cos)
            for (int head = 0; head < step.heads + step.kv_heads; head++)
                rotate(row + head * step.dim, step.cos + t * step.turned, step.sin + t * step.turned, step.turned);
        const T* keys = row + step.heads * step.dim;
        std::memcpy(step.keys + step.slots[t] * width, keys, width * sizeof(T));
        std::memcpy(step.values + step.slots[t] * width, keys + width, width * sizeof(T));
    });
}

}  // namespace octavo
