// A freshly built library is tried once, in a process of its own, before anybody computes with it.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "product.h"

namespace octavo {

inline void assign(float& to, float value) { to = value; }
inline void assign(bfloat16& to, float value) {
    bfloat16 all[LANES];
    store(all, splat(value));
    to = all[0];
}

// Three rows on one cache: two single tokens that share blocks, and a chunk. Against two plain loops.
template <class T>
bool attention_agrees(float tolerance) {
    const int heads = 6, kv_heads = 2, dim = 48, size = 4, blocks = 64;
    std::vector<int32_t> first, second, third;
    for (int i = 0; i < 20; i++) {
        first.push_back(i);
        second.push_back(i < 16 ? i : i + 10);
        third.push_back(63 - i);
    }
    auto fill = [](std::vector<T>& values) {
        uint32_t state = 1;
        for (T& value : values) {
            state = state * 1664525u + 1013904223u;
            assign(value, float(state >> 8) / (1 << 23) - 1.0f);
        }
    };
    std::vector<T> query(12 * heads * dim), keys(blocks * size * kv_heads * dim), values(keys.size()), output(query.size());
    fill(query), fill(keys), fill(values);
    Plan plan;
    plan.block_size = size;
    plan.rows = {{0, 1, 77, first.data()}, {1, 1, 80, second.data()}, {2, 10, 70, third.data()}};
    plan.positions = {76, 79, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69};
    Planner(plan, TILE / (heads / kv_heads), 2, true).make();
    Layer<T> layer{query.data(), heads * dim, keys.data(), values.data(), output.data(),
                   heads,        kv_heads,    dim,         dim,           0.2f * LOG2E};
    prepare(plan, heads, dim);
    std::vector<Worker<T>> workers(2, Worker<T>(plan, dim, dim));
    Team::run(2, [&](Team& team) { attend(team, plan, layer, workers[team.index()]); });
    for (const Row& row : plan.rows)
        for (int t = row.start; t < row.start + row.length; t++)
            for (int head = 0; head < heads; head++) {
                std::vector<float> sums(dim);
                float total = 0;
                for (int p = 0; p <= plan.positions[t]; p++) {
                    int64_t at = ((int64_t(row.blocks[p / size]) * size + p % size) * kv_heads + head * kv_heads / heads) * dim;
                    float score = 0;
                    for (int d = 0; d < dim; d++)
                        score += to_float(query[(t * heads + head) * dim + d]) * to_float(keys[at + d]);
                    float weight = std::exp(score * 0.2f);
                    total += weight;
                    for (int d = 0; d < dim; d++) sums[d] += weight * to_float(values[at + d]);
                }
                for (int d = 0; d < dim; d++)
                    if (!(std::fabs(sums[d] / total - to_float(output[(t * heads + head) * dim + d])) < tolerance)) return false;
            }
    return true;
}

template <class T>
bool norm_agrees(float tolerance) {
    const int size = 40;
    std::vector<T> from(size), weight(size), to(size);
    float squares = 0;
    for (int i = 0; i < size; i++) {
        assign(from[i], float(i % 7) - 3);
        assign(weight[i], 1 + i % 3);
        squares += to_float(from[i]) * to_float(from[i]);
    }
    norm_row(to.data(), from.data(), Norm<T>{weight.data(), 0.01f}, size);
    for (int i = 0; i < size; i++) {
        float expected = to_float(from[i]) / std::sqrt(squares / size + 0.01f) * to_float(weight[i]);
        if (!(std::fabs(expected - to_float(to[i])) < tolerance)) return false;
    }
    return true;
}

template <class T>
bool product_agrees(float tolerance) {
    const int rows = 11, inputs = 34, outputs = 53;
    std::vector<T> x(rows * inputs), weight(outputs * inputs), to(rows * outputs);
    for (size_t i = 0; i < x.size(); i++) assign(x[i], float(i % 11) - 5);
    for (size_t i = 0; i < weight.size(); i++) assign(weight[i], (float(i % 7) - 3) / 8);
    Weight<T> laid{nullptr, nullptr, inputs, outputs};
    std::vector<Words> panels(laid.count() * laid.steps() * PANEL);
    laid.panels = panels.data();
    Team::run(2, [&](Team& team) {
        lay_out(team, panels.data(), weight.data(), outputs, inputs);
        product(team, x.data(), inputs, rows, laid, (const T*)nullptr, to.data());
    });
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < outputs; column++) {
            float expected = 0;
            for (int k = 0; k < inputs; k++)
                expected += to_float(x[row * inputs + k]) * to_float(weight[column * inputs + k]);
            if (!(std::fabs(expected - to_float(to[row * outputs + column])) < tolerance)) return false;
        }
    return true;
}

}  // namespace octavo
