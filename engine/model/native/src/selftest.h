// A freshly built library is tried once, in a process of its own, before anybody computes with it.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "product.h"
#include "scores.h"

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
    std::vector<Worker<T>> workers(2, Worker<T>(plan, kv_heads, dim, dim));
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

template <class T, class W>
bool product_agrees(float tolerance) {
    const int rows = 11, inputs = 34, outputs = 53;
    std::vector<T> x(rows * inputs), to(rows * outputs);
    std::vector<W> weight(outputs * inputs);
    for (size_t i = 0; i < x.size(); i++) assign(x[i], float(i % 11) - 5);
    for (size_t i = 0; i < weight.size(); i++) assign(weight[i], (float(i % 7) - 3) / 8);
    Weight<T> laid{nullptr, nullptr, inputs, outputs, sizeof(uint32_t) / sizeof(W)};
    std::vector<Words> panels(laid.count() * laid.steps() * PANEL);
    laid.panels = panels.data();
    Team::run(2, [&](Team& team) {
        lay_out(team, panels.data(), weight.data(), outputs, inputs);
        Feed<T> feed(rows, inputs);
        product(team, feed, x.data(), inputs, rows, laid, (const T*)nullptr, to.data());
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

template <class T>
std::vector<T> filled(size_t count, int period, float scale) {
    std::vector<T> values(count);
    for (size_t i = 0; i < count; i++) assign(values[i], (float(i * 7 % period) - period / 2) * scale);
    return values;
}

inline bool near(float expected, float found, float tolerance) { return std::fabs(expected - found) <= tolerance; }

template <class T>
bool silu_agrees(float tolerance) {
    const int rows = 3, size = 21;
    auto from = filled<T>(rows * 2 * size, 13, 0.5f);
    std::vector<T> to(rows * size);
    Team::run(2, [&](Team& team) { silu_mul(team, to.data(), from.data(), rows, size); });
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < size; i++) {
            float gate = to_float(from[row * 2 * size + i]), up = to_float(from[row * 2 * size + size + i]);
            if (!near(gate / (1 + std::exp(-gate)) * up, to_float(to[row * size + i]), tolerance)) return false;
        }
    return true;
}

// Queries and keys turn, values do not, and both of the latter come to their slots.
template <class T>
bool rotation_agrees(float tolerance) {
    const int tokens = 2, heads = 2, kv_heads = 1, dim = 48, turned = 34, width = (heads + 2 * kv_heads) * dim;
    auto packed = filled<T>(tokens * width, 17, 0.25f), before = packed;
    auto cos = filled<T>(tokens * turned, 5, 0.5f), sin = filled<T>(tokens * turned, 9, 0.25f);
    std::vector<T> keys(4 * dim), values(4 * dim);
    const int64_t slots[] = {3, 1};
    Team::run(2, [&](Team& team) {
        rotate_store(team, Projected<T>{packed.data(), width, cos.data(), sin.data(), slots, keys.data(), values.data(),
                                        tokens, heads, kv_heads, dim, turned, {nullptr, 0}, {nullptr, 0}});
    });
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < width; i++) {
            int head = i / dim, d = i % dim, other = d < turned / 2 ? d + turned / 2 : d - turned / 2;
            float expected = to_float(before[t * width + i]);
            if (head < heads + kv_heads && d < turned) {
                float across = to_float(before[t * width + head * dim + other]) * to_float(sin[t * turned + d]);
                expected = expected * to_float(cos[t * turned + d]) + (d < turned / 2 ? -across : across);
            }
            const T& found = head < heads ? packed[t * width + i] : (head == heads ? keys : values)[slots[t] * dim + d];
            if (!near(expected, to_float(found), tolerance)) return false;
        }
    return true;
}

inline bool scores_agree() {
    const int size = 700, peaks = (size + PEAK - 1) / PEAK;
    auto row = filled<float>(size, 31, 0.25f);
    float best = -INFINITY, found_best, found_mass, maxima[peaks];
    int64_t found_id;
    double total = 0, upto = 0, found_total;
    for (float score : row) best = std::max(best, score);
    for (float score : row) total += std::exp(double(score) - best);
    const int64_t rows[] = {0};
    const float temperature = 1.0f;
    const double number = 0.4321;
    int64_t id;
    std::vector<double> sums(2 * (size / CHUNK + 2));
    Scores scores{row.data(), size, size};
    Team::run(2, [&](Team& team) {
        survey(team, scores, 1, Survey{maxima, &found_best, &found_id, &found_mass});
        draw(team, scores, Draws{rows, &best, &temperature, &number, 1, 1, &found_total, &id}, sums.data());
    });
    for (int i = 0; i < id; i++) upto += std::exp(double(row[i]) - best);
    double after = upto + std::exp(double(row[id]) - best);
    return found_best == best && row[found_id] == best && near(std::log(total), found_mass, 1e-5f) && near(total, found_total, 1e-4f * total) &&
           upto <= (number + 1e-5) * total && after >= (number - 1e-5) * total;
}

// Two layers by two threads, against the same operations called one after the other by one.
template <class T>
bool decoder_agrees() {
    const int64_t tokens = 5, hidden = 32, inner = 40, vocabulary = 50;
    const int heads = 2, kv_heads = 1, dim = 16, width = (heads + 2 * kv_heads) * dim, layers = 2, size = 4;
    auto unit = filled<T>(64, 3, 0.25f), cos = filled<T>(tokens * dim, 5, 0.25f), sin = filled<T>(tokens * dim, 7, 0.25f);
    auto start = filled<T>(tokens * hidden, 19, 0.125f);
    auto laid = [](const std::vector<T>& weight, int64_t inputs, int64_t outputs, std::vector<Words>& panels) {
        Weight<T> made{nullptr, nullptr, inputs, outputs, sizeof(uint32_t) / sizeof(T)};
        panels.resize(made.count() * made.steps() * PANEL);
        Team::run(1, [&](Team& team) { lay_out(team, panels.data(), weight.data(), outputs, inputs); });
        made.panels = panels.data();
        return made;
    };
    std::vector<Words> panels[5];
    Weight<T> qkv = laid(filled<T>(width * hidden, 11, 0.03f), hidden, width, panels[0]);
    Weight<T> out = laid(filled<T>(hidden * heads * dim, 13, 0.03f), heads * dim, hidden, panels[1]);
    Weight<T> gate_up = laid(filled<T>(2 * inner * hidden, 17, 0.03f), hidden, 2 * inner, panels[2]);
    Weight<T> down = laid(filled<T>(hidden * inner, 23, 0.03f), inner, hidden, panels[3]);
    Weight<T> head = laid(filled<T>(vocabulary * hidden, 29, 0.03f), hidden, vocabulary, panels[4]);
    const Norm<T> norm{unit.data(), 1e-5f}, none{nullptr, 0};
    const std::vector<int32_t> table = {1, 0};
    const int64_t slots[] = {4, 5, 6, 7, 0}, keep[] = {4, 2};
    Plan plan;
    plan.block_size = size;
    plan.rows = {{0, int(tokens), int(tokens), table.data()}};
    plan.positions = {0, 1, 2, 3, 4};
    Planner(plan, TILE / heads, 2, true).make();
    std::vector<T> cache[2 * layers], x = start;
    std::vector<DecoderLayer<T>> made;
    for (auto& each : cache) each.resize(2 * size * kv_heads * dim);
    for (int i = 0; i < layers; i++)
        made.push_back({norm, none, none, norm, qkv, out, gate_up, down, cache[2 * i].data(), cache[2 * i + 1].data(), 0.25f, 1});
    std::vector<float> logits(2 * vocabulary), expected(2 * vocabulary);
    Decoder<T> decoder{made.data(), norm, head, layers, heads, kv_heads, dim, dim};
    run(decoder, Step<T>{x.data(), cos.data(), sin.data(), slots, keep, logits.data(), tokens, 2}, plan, 2);
    x = start;
    prepare(plan, heads, dim);
    Worker<T> worker(plan, kv_heads, dim, dim);
    Feed<T> feed(tokens, inner);
    Team::run(1, [&](Team& team) {
        std::vector<T> normed(tokens * hidden), packed(tokens * width), seen(tokens * hidden), gates(tokens * 2 * inner), gated(tokens * inner);
        for (const DecoderLayer<T>& layer : made) {
            rms_norm(team, normed.data(), x.data(), hidden, layer.norm, tokens, hidden);
            product(team, feed, normed.data(), hidden, tokens, layer.qkv, (const T*)nullptr, packed.data());
            rotate_store(team, Projected<T>{packed.data(), width, cos.data(), sin.data(), slots, layer.keys, layer.values, tokens,
                                            heads, kv_heads, dim, dim, none, none});
            attend(team, plan, Layer<T>{packed.data(), width, layer.keys, layer.values, seen.data(), heads, kv_heads, dim, dim,
                                        layer.scale * LOG2E}, worker);
            product(team, feed, seen.data(), heads * dim, tokens, layer.out, x.data(), x.data());
            rms_norm(team, normed.data(), x.data(), hidden, layer.mlp_norm, tokens, hidden);
            product(team, feed, normed.data(), hidden, tokens, layer.gate_up, (const T*)nullptr, gates.data());
            silu_mul(team, gated.data(), gates.data(), tokens, inner);
            product(team, feed, gated.data(), inner, tokens, layer.down, x.data(), x.data());
        }
        for (int i = 0; i < 2; i++) {
            norm_row(normed.data(), x.data() + keep[i] * hidden, norm, hidden);
            product(team, feed, normed.data(), hidden, 1, head, (const T*)nullptr, expected.data() + i * vocabulary);
        }
    });
    for (size_t i = 0; i < logits.size(); i++)
        if (!near(expected[i], logits[i], 1e-2f) || logits[i] == 0.0f) return false;
    return true;
}

}  // namespace octavo
