// x @ weight.T over weights that were laid out once: panels of outputs, read from the first to the last byte.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace octavo {

constexpr int PANEL = REGISTERS > 16 ? 3 : 2;  // vectors of outputs in a panel
constexpr int ROWS = REGISTERS > 16 ? 8 : 6;   // rows of x that are multiplied at once: their sums fill the registers
constexpr int WIDTH = PANEL * LANES;           // outputs in a panel
constexpr int AHEAD = 16;                      // steps from the call of a line to its use
// Inputs of x for which weights are read once: as many as stay near the processor, and enough rows to be worth the way.
constexpr int64_t NEAR = REGISTERS > 16 ? 1 << 18 : 1 << 15, ENOUGH = 8 * ROWS;

// How words of weights that are kept as W are multiplied by inputs of T: TAKEN inputs of an output lie in one, and it
// takes PARTS multiplications. Element: what one of those takes of x.
template <class T, class W>
struct Inputs;

template <>
struct Inputs<float, float> {
    using Element = float;
    static constexpr int TAKEN = 1, PARTS = 1;
    static Words part(Words words, int) { return words; }
    static Floats multiply(Floats sum, Words weights, float input) {
        return sum + reinterpret_cast<Floats>(weights) * input;
    }
};

// Both halves of a word are multiplied as floats: the sums of weights that were floats, from half of the memory.
template <>
struct Inputs<float, bfloat16> {
    using Element = float;
    static constexpr int TAKEN = 2, PARTS = 2;
    static Words part(Words words, int which) { return which ? words & 0xffff0000u : words << 16; }
    static Floats multiply(Floats sum, Words weights, float input) {
        return Inputs<float, float>::multiply(sum, weights, input);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Inputs<bfloat16, bfloat16> {
    using Element = uint32_t;  // a pair
    static constexpr int TAKEN = 2, PARTS = 1;
    static Words part(Words words, int) { return words; }
    static Floats multiply(Floats sum, Words weights, uint32_t input) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)weights, (__m512bh)_mm512_set1_epi32(input));
    }
};
template <class T>
using Fed = T;  // what x is multiplied as
#else
template <class T>
using Fed = float;
#endif

inline uint32_t word(const float* weights) {
    uint32_t bits;
    std::memcpy(&bits, weights, sizeof bits);
    return bits;
}
inline uint32_t word(const bfloat16* weights) { return weights[0].bits | uint32_t(weights[1].bits) << 16; }

// A weight [outputs, inputs] as panels: [panels][steps][PANEL] vectors of words.
template <class T>
struct Weight {
    const Words* panels;
    const T* bias;  // or null
    int64_t inputs, outputs;
    int64_t taken;  // inputs of a word: 2 where weights are kept as bfloat16, which floats may be
    int64_t steps() const { return inputs / taken; }
    int64_t count() const { return (outputs + WIDTH - 1) / WIDTH; }
};

template <class T>
void lay_out(Team& team, Words* to, const T* weight, int64_t outputs, int64_t inputs) {
    constexpr int TAKEN = sizeof(uint32_t) / sizeof(T);
    int64_t steps = inputs / TAKEN, vectors = (outputs + WIDTH - 1) / WIDTH * PANEL;
    team.split(vectors, [&](int64_t v) {
        Words* panel = to + v / PANEL * steps * PANEL + v % PANEL;
        for (int64_t k = 0; k < steps; k++) {
            Words all = {};
            for (int i = 0; i < LANES; i++)
                if (v * LANES + i < outputs) all[i] = word(weight + (v * LANES + i) * inputs + k * TAKEN);
            panel[k * PANEL] = all;
        }
    });
}

// Rows of x as multiplications take them: where they lie, or in a place of this thread's own.
template <class T>
class Feed {
    static constexpr bool COPIES = !std::is_same_v<T, Fed<T>>;

   public:
    // most: inputs of the widest product.
    Feed(int64_t rows, int64_t most) : copy_(COPIES ? std::min(rows * most, std::max(NEAR, ENOUGH * most)) : 0) {}

    static int64_t rows(int64_t inputs) { return std::max(NEAR / inputs / ROWS * ROWS, ENOUGH); }
    static int64_t stride(int64_t stride, int64_t inputs) { return COPIES ? inputs : stride; }

    const Fed<T>* of(const T* x, int64_t stride, int64_t rows, int64_t inputs) {
        if constexpr (COPIES) {
            for (int64_t row = 0; row < rows; row++)
                for (int64_t k = 0; k < inputs; k += LANES)
                    store_first(copy_.data() + row * inputs + k, load_first(x + row * stride + k, inputs - k), inputs - k);
            return copy_.data();
        } else {
            return x;
        }
    }

   private:
    std::vector<Fed<T>> copy_;
};

// R rows of x against one panel. Out goes sum + bias + residual, rounded once. What lies `ahead` is called from memory
// meanwhile, line by line.
template <int R, class How, class T, class Out>
void multiply(const Fed<T>* x, int64_t stride, const Weight<T>& weight, int64_t panel, const T* residual, Out* to,
              const Words* ahead) {
    const int64_t steps = weight.steps();
    const Words* lines = weight.panels + panel * steps * PANEL;
    Floats sums[R][PANEL];  // an initialiser would be a call of memset, and go through memory
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL; v++) sums[r][v] = Floats{};
    for (int64_t k = 0; k < steps; k++, lines += PANEL, ahead += PANEL) {
        for (size_t at = 0; at < PANEL * sizeof(Words); at += LINE) __builtin_prefetch((const char*)ahead + at, 0, 2);
        for (int part = 0; part < How::PARTS; part++) {
            Words weights[PANEL];
            for (int v = 0; v < PANEL; v++) weights[v] = How::part(lines[v], part);
            for (int r = 0; r < R; r++) {
                typename How::Element input;
                std::memcpy(&input, x + r * stride + k * How::TAKEN + part, sizeof input);
                for (int v = 0; v < PANEL; v++) sums[r][v] = How::multiply(sums[r][v], weights[v], input);
            }
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
template <class How, class T, class Out>
void multiply(const Fed<T>* x, int64_t stride, int64_t rows, const Weight<T>& weight, int64_t panel, const T* residual,
              Out* to) {
    const Words* lines = weight.panels + panel * weight.steps() * PANEL;
    const int64_t tiles = (rows + ROWS - 1) / ROWS;  // of about the same height: a low one has few sums, and waits for each
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
        auto run = [&](auto kernel) {  // the first rows take the panel from memory, others have time for the next
            const Words* ahead = lines + (row ? weight.steps() : AHEAD) * PANEL;
            kernel(x + row * stride, stride, weight, panel, residual ? residual + row * weight.outputs : nullptr,
                   to + row * weight.outputs, ahead);
        };
        switch (height) {
            case 1: run(multiply<1, How, T, Out>); break;
            case 2: run(multiply<2, How, T, Out>); break;
            case 3: run(multiply<3, How, T, Out>); break;
            case 4: run(multiply<4, How, T, Out>); break;
            case 5: run(multiply<5, How, T, Out>); break;
            case 6: run(multiply<6, How, T, Out>); break;
            case 7: run(multiply<7, How, T, Out>); break;
            case 8: run(multiply<8, How, T, Out>); break;
        }
    }
}

template <class How, class T, class Out>
void product(Team& team, Feed<T>& feed, const T* x, int64_t stride, int64_t rows, const Weight<T>& weight, const T* residual,
             Out* to) {
    const int64_t inputs = weight.inputs, outputs = weight.outputs, most = Feed<T>::rows(inputs);
    team.share(weight.count(), [&](int64_t from, int64_t end) {
        for (int64_t row = 0, count; row < rows; row += count) {
            count = std::min(rows - row, most);
            const auto* fed = feed.of(x + row * stride, stride, count, inputs);
            for (int64_t panel = from; panel < end; panel++)
                multiply<How>(fed, Feed<T>::stride(stride, inputs), count, weight, panel,
                              residual ? residual + row * outputs : nullptr, to + row * outputs);
        }
    });
}

template <class T, class Out>
void product(Team& team, Feed<T>& feed, const T* x, int64_t stride, int64_t rows, const Weight<T>& weight, const T* residual,
             Out* to) {
    if (weight.taken == 2)
        product<Inputs<Fed<T>, bfloat16>>(team, feed, x, stride, rows, weight, residual, to);
    else if constexpr (std::is_same_v<T, float>)
        product<Inputs<float, float>>(team, feed, x, stride, rows, weight, residual, to);
}

}  // namespace octavo
