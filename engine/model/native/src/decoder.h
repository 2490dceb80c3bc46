// A whole decoder as one call: all threads walk the layers together and meet at the end of every operation.
#pragma once
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "product.h"

namespace octavo {

template <class T>
struct DecoderLayer {
    Norm<T> norm, query_norm, key_norm, mlp_norm;
    Weight<T> qkv, out, gate_up, down;
    T* keys;
    T* values;
    float scale;
    int rotates;
};

template <class T>
struct Decoder {
    const DecoderLayer<T>* layers;
    Norm<T> norm;
    Weight<T> head;
    int count, heads, kv_heads, dim, turned;
};

// One step's arrays.
template <class T>
struct Step {
    T* x;  // [tokens, hidden]: the embeddings; overwritten
    const T* cos;
    const T* sin;
    const int64_t* slots;
    const int64_t* keep;  // tokens whose logits are wanted, [kept]
    float* logits;        // [kept, vocabulary]
    int64_t tokens, kept;
};

// What lies between two operations.
template <class T>
struct Workspace {
    std::vector<T> normed, qkv, attended, gates, gated, kept_x, kept_attended;

    Workspace(const Decoder<T>& decoder, const Step<T>& step) {
        const DecoderLayer<T>& layer = decoder.layers[0];
        int64_t rows = std::max(step.tokens, step.kept);  // the same token may be kept twice
        normed.resize(rows * layer.qkv.inputs);
        qkv.resize(step.tokens * layer.qkv.outputs);
        attended.resize(step.tokens * layer.out.inputs);
        gates.resize(rows * layer.gate_up.outputs);
        gated.resize(rows * layer.down.inputs);
        kept_x.resize(step.kept * layer.qkv.inputs);
        kept_attended.resize(step.kept * layer.out.inputs);
    }
};

template <class T>
Feed<T> feed_of(const Decoder<T>& decoder, const Step<T>& step) {
    const DecoderLayer<T>& layer = decoder.layers[0];
    return {std::max(step.tokens, step.kept), std::max({layer.qkv.inputs, layer.out.inputs, layer.down.inputs})};
}

template <class T>
void pick(Team& team, T* to, const T* rows, int64_t size, const int64_t* keep, int64_t kept) {
    team.split(kept, [&](int64_t i) { std::memcpy(to + i * size, rows + keep[i] * size, size * sizeof(T)); });
}

template <class T>
void run(Team& team, const Decoder<T>& decoder, const DecoderLayer<T>& layer, const Step<T>& step, Plan& plan,
         Workspace<T>& space, Worker<T>& worker, Feed<T>& feed, bool is_last) {
    const int64_t hidden = layer.qkv.inputs, width = layer.qkv.outputs, inner = layer.down.inputs;
    rms_norm(team, space.normed.data(), step.x, hidden, layer.norm, step.tokens, hidden);
    product(team, feed, space.normed.data(), hidden, step.tokens, layer.qkv, (const T*)nullptr, space.qkv.data());
    rotate_store(team, Projected<T>{space.qkv.data(), width, layer.rotates ? step.cos : nullptr, step.sin, step.slots, layer.keys,
                              layer.values, step.tokens, decoder.heads, decoder.kv_heads, decoder.dim, decoder.turned,
                              layer.query_norm, layer.key_norm});
    attend(team, plan,
           Layer<T>{space.qkv.data(), width, layer.keys, layer.values, space.attended.data(), decoder.heads,
                    decoder.kv_heads, decoder.dim, decoder.dim, layer.scale * LOG2E},
           worker);
    T *x = step.x, *attended = space.attended.data();
    int64_t rows = step.tokens;
    if (is_last) {  // its keys and values are for all tokens, what follows only for those whose logits are wanted
        pick(team, space.kept_x.data(), x, hidden, step.keep, step.kept);
        pick(team, space.kept_attended.data(), attended, layer.out.inputs, step.keep, step.kept);
        x = space.kept_x.data(), attended = space.kept_attended.data(), rows = step.kept;
    }
    product(team, feed, attended, layer.out.inputs, rows, layer.out, x, x);
    rms_norm(team, space.normed.data(), x, hidden, layer.mlp_norm, rows, hidden);
    product(team, feed, space.normed.data(), hidden, rows, layer.gate_up, (const T*)nullptr, space.gates.data());
    silu_mul(team, space.gated.data(), space.gates.data(), rows, inner);
    product(team, feed, space.gated.data(), inner, rows, layer.down, x, x);
}

template <class T>
void run(const Decoder<T>& decoder, const Step<T>& step, Plan& plan, int threads) {
    Workspace<T> space(decoder, step);  // nothing is allocated among threads: an exception could not leave them
    std::vector<Worker<T>> workers(threads, Worker<T>(plan, decoder.kv_heads, decoder.dim, decoder.dim));
    std::vector<Feed<T>> feeds(threads, feed_of(decoder, step));
    prepare(plan, decoder.heads, decoder.dim);
    Team::run(threads, [&](Team& team) {
        Worker<T>& worker = workers[team.index()];
        Feed<T>& feed = feeds[team.index()];
        for (int i = 0; i < decoder.count; i++)
            run(team, decoder, decoder.layers[i], step, plan, space, worker, feed, i + 1 == decoder.count);
        const int64_t hidden = decoder.head.inputs;
        rms_norm(team, space.normed.data(), space.kept_x.data(), hidden, decoder.norm, step.kept, hidden);
        product(team, feed, space.normed.data(), hidden, step.kept, decoder.head, (const T*)nullptr, step.logits);
    });
}

}  // namespace octavo
