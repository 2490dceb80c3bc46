// x @ weight.T over weights that were laid out once: panels of 48 outputs, read from the first to the last byte.
#pragma once
#include <algorithm>
#include <cstdint>

#include "team.h"
#include "vectors.h"

namespace octavo {

constexpr int PANEL = 3;                // vectors of outputs in a panel
constexpr int WIDTH = PANEL * LANES;    // outputs in a panel
constexpr int AHEAD = 16;               // steps from the call of a line to its use
constexpr int ROWS = 8;                 // rows of x that are multiplied at once: 8 * 3 sums fill the registers

// How inputs are taken: one by one, or in pairs where the processor multiplies pairs.
template <class T>
struct Inputs {
    using Element = T;
    static constexpr int TAKEN = 1;
    static Words lay(const T* const* weights, int64_t k) {  // one input of sixteen outputs
        Floats all;
        for (int i = 0; i < LANES; i++) all[i] = weights[i] ? to_float(weights[i][k]) : 0.0f;
        return reinterpret_cast<Words>(all);
    }
    static Floats multiply(Floats sum, Words weights, T input) {
        return sum + reinterpret_cast<Floats>(weights) * to_float(input);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Inputs<bfloat16> {
    using Element = uint32_t;
    static constexpr int TAKEN = 2;
    static Words lay(const bfloat16* const* weights, int64_t k) {
        Words all = {};
        for (int i = 0; i < LANES; i++)
            if (weights[i]) all[i] = weights[i][2 * k].bits | uint32_t(weights[i][2 * k + 1].bits) << 16;
        return all;
    }
    static Floats multiply(Floats sum, Words weights, uint32_t input) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)weights, (__m512bh)_mm512_set1_epi32(input));
    }
};
#endif

// A weight [outputs, inputs] as panels: [panels][inputs / TAKEN][PANEL] vectors.
template <class T>
struct Weight {
    const Words* panels;
    const T* bias;  // or null
    int64_t inputs, outputs;
    int64_t steps() const { return inputs / Inputs<T>::TAKEN; }
    int64_t count() const { return (outputs + WIDTH - 1) / WIDTH; }
};

template <class T>
void lay_out(Team& team, Words* to, const T* weight, int64_t outputs, int64_t inputs) {
    int64_t steps = inputs / Inputs<T>::TAKEN, vectors = (outputs + WIDTH - 1) / WIDTH * PANEL;
    team.split(vectors, [&](int64_t v) {
        const T* rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = v * LANES + i < outputs ? weight + (v * LANES + i) * inputs : nullptr;
        Words* panel = to + v / PANEL * steps * PANEL + v % PANEL;
        for (int64_t k = 0; k < steps; k++) panel[k * PANEL] = Inputs<T>::lay(rows, k);
    });
}

// R rows of x against one panel. Out goes sum + bias + residual, rounded once. What lies `ahead` is called from memory
// meanwhile, line by line.
template <int R, class T, class Out>
void multiply(const T* x, int64_t stride, const Weight<T>& weight, int64_t panel, const T* residual, Out* to,
              const Words* ahead) {
    using Element = typename Inputs<T>::Element;
    const int64_t steps = weight.steps();
    const Words* lines = weight.panels + panel * steps * PANEL;
    Floats sums[R][PANEL];  // an initialiser would be a call of memset, and go through memory
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL; v++) sums[r][v] = Floats{};
    for (int64_t k = 0; k < steps; k++, lines += PANEL, ahead += PANEL) {
        for (int v = 0; v < PANEL; v++) __builtin_prefetch(ahead + v, 0, 2);
        for (int r = 0; r < R; r++) {
            Element input;
            std::memcpy(&input, x + r * stride + k * Inputs<T>::TAKEN, sizeof input);
            for (int v = 0; v < PANEL; v++) sums[r][v] = Inputs<T>::multiply(sums[r][v], lines[v], input);
        }
    }
    for (int v = 0; v < PANEL; v++) {
        int64_t column = panel * WIDTH + v * LANES;
        int left = int(std::min<int64_t>(weight.outputs - column, LANES));
        if (left <= 0) return;
        Floats bias = weight.bias ? load_first(weight.bias + column, left) : Floats{};
        for (int r = 0; r < R; r++) {
            Floats sum = sums[r][v] + bias;
            if (residual) sum += load_first(residual + r * weight.outputs + column, left);
            store_first(to + r * weight.outputs + column, sum, left);
        }
    }
}

// One panel for all rows. residual and to: [rows, outputs]; they may be the same memory.
template <class T, class Out>
void multiply(const T* x, int64_t stride, int64_t rows, const Weight<T>& weight, int64_t panel, const T* residual, Out* to) {
    const Words* lines = weight.panels + panel * weight.steps() * PANEL;
    auto run = [&](auto&& kernel, int64_t row) {  // the first rows take the panel from memory, others have time for the next
        const Words* ahead = lines + (row ? weight.steps() : AHEAD) * PANEL;
        kernel(x + row * stride, stride, weight, panel, residual ? residual + row * weight.outputs : nullptr,
               to + row * weight.outputs, ahead);
    };
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) run(multiply<ROWS, T, Out>, row);
    switch (rows - row) {
        case 1: return run(multiply<1, T, Out>, row);
        case 2: return run(multiply<2, T, Out>, row);
        case 3: return run(multiply<3, T, Out>, row);
        case 4: return run(multiply<4, T, Out>, row);
        case 5: return run(multiply<5, T, Out>, row);
        case 6: return run(multiply<6, T, Out>, row);
        case 7: return run(multiply<7, T, Out>, row);
    }
}

template <class T, class Out>
void product(Team& team, const T* x, int64_t stride, int64_t rows, const Weight<T>& weight, const T* residual, Out* to) {
    team.split(weight.count(), [&](int64_t panel) { multiply(x, stride, rows, weight, panel, residual, to); });
}

}  // namespace octavo
