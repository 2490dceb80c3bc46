// The library's C face. Pointers are not checked here: octavo.engine.model.native.library does that.
#include <memory>
#include <new>

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "product.h"
#include "scores.h"
#include "selftest.h"

using namespace octavo;

constexpr int64_t WORTH_A_TEAM = 1 << 15;  // elements; waking another thread costs microseconds

// 1 when there is no memory, which no exception may say across the border.
template <class Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" {

// 0 when the kernels compute what they should on this processor.
int octavo_selftest() {
    return !(attention_agrees<float>(1e-4f) && attention_agrees<bfloat16>(2e-2f) && norm_agrees<float>(1e-4f) &&
             norm_agrees<bfloat16>(5e-2f) && product_agrees<float, float>(1e-3f) && product_agrees<float, bfloat16>(1e-3f) &&
             product_agrees<bfloat16, bfloat16>(0.2f) &&
             silu_agrees<float>(1e-4f) && silu_agrees<bfloat16>(5e-2f) && rotation_agrees<float>(1e-5f) &&
             rotation_agrees<bfloat16>(5e-2f) && scores_agree() && decoder_agrees<float>() && decoder_agrees<bfloat16>());
}

// tables: the block tables of all rows, one behind the other; table_sizes: blocks of each. Null: there is no memory.
Plan* octavo_plan(int rows, const int32_t* starts, const int32_t* lengths, const int32_t* contexts, const int32_t* tables,
                  const int32_t* table_sizes, int block_size, int group, int shares, int threads) {
    auto plan = std::make_unique<Plan>();
    int failed = guarded([&] {
        plan->block_size = block_size;
        int64_t size = 0;
        int tokens = 0;
        for (int i = 0; i < rows; i++) size += table_sizes[i], tokens += lengths[i];
        plan->tables.assign(tables, tables + size);
        plan->positions.resize(tokens);
        const int32_t* table = plan->tables.data();
        for (int i = 0; i < rows; i++) {
            plan->rows.push_back({starts[i], lengths[i], contexts[i], table});
            for (int t = 0; t < lengths[i]; t++) plan->positions[starts[i] + t] = contexts[i] - lengths[i] + t;
            table += table_sizes[i];
        }
        Planner(*plan, TILE / group > 1 ? TILE / group : 1, threads, shares).make();
    });
    return failed ? nullptr : plan.release();
}

void octavo_free(Plan* plan) { delete plan; }

int octavo_is_threaded() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Whether products are worth their own kernel on this processor.
int octavo_has_products() {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

int octavo_panel_width() { return WIDTH; }

#define OCTAVO_FOR(T, NAME)                                                                                              \
    int octavo_attend_##NAME(Plan* plan, const T* query, int64_t stride, const T* keys, const T* values, T* output,     \
                             int heads, int kv_heads, int key_dim, int value_dim, float scale, int threads) {           \
        return guarded([&] {                                                                                            \
            Layer<T> layer{query, stride,   keys,    values,    output,                                                 \
                           heads, kv_heads, key_dim, value_dim, scale * LOG2E};                                         \
            std::vector<Worker<T>> workers(threads, Worker<T>(*plan, kv_heads, key_dim, value_dim));                              \
            prepare(*plan, heads, value_dim);                                                                           \
            Team::run(threads, [&](Team& team) { attend(team, *plan, layer, workers[team.index()]); });                 \
        });                                                                                                             \
    }                                                                                                                   \
    void octavo_rms_norm_##NAME(T* to, const T* from, int64_t stride, const T* weight, int64_t rows, int64_t size,       \
                                float eps, int threads) {                                                                \
        Team::run(rows * size > WORTH_A_TEAM ? threads : 1,                                                              \
                  [&](Team& team) { rms_norm(team, to, from, stride, Norm<T>{weight, eps}, rows, size); });              \
    }                                                                                                                    \
    void octavo_silu_mul_##NAME(T* to, const T* from, int64_t rows, int64_t size, int threads) {                         \
        Team::run(rows * size > WORTH_A_TEAM ? threads : 1, [&](Team& team) { silu_mul(team, to, from, rows, size); });  \
    }                                                                                                                    \
    void octavo_rotate_store_##NAME(T* packed, int64_t stride, const T* cos, const T* sin, const int64_t* slots,         \
                                    T* keys, T* values, int64_t tokens, int heads, int kv_heads, int dim, int turned,    \
                                    int threads) {                                                                       \
        Projected<T> step{packed, stride, cos,      sin, slots,  keys,         values,                                   \
                          tokens, heads,  kv_heads, dim, turned, {nullptr, 0}, {nullptr, 0}};                            \
        Team::run(tokens * stride > WORTH_A_TEAM ? threads : 1, [&](Team& team) { rotate_store(team, step); });          \
    }                                                                                                                    \
    void octavo_lay_out_##NAME(Words* to, const T* weight, int64_t outputs, int64_t inputs, int threads) {               \
        Team::run(threads, [&](Team& team) { lay_out(team, to, weight, outputs, inputs); });                             \
    }                                                                                                                    \
    int octavo_product_##NAME(const T* x, int64_t stride, int64_t rows, const Words* panels, const T* bias,              \
                              int64_t inputs, int64_t outputs, int64_t taken, const T* residual, T* to, int threads) {   \
        return guarded([&] {                                                                                             \
            std::vector<Feed<T>> feeds(threads, Feed<T>(rows, inputs));                                                  \
            Weight<T> weight{panels, bias, inputs, outputs, taken};                                                      \
            Team::run(threads,                                                                                           \
                      [&](Team& team) { product(team, feeds[team.index()], x, stride, rows, weight, residual, to); });   \
        });                                                                                                              \
    }                                                                                                                    \
    int octavo_decoder_##NAME(const Decoder<T>* decoder, const Step<T>* step, Plan* plan, int threads) {                \
        return guarded([&] { run(*decoder, *step, *plan, threads); });                                                  \
    }

// For scores there is float32 only.
void octavo_survey_float32(const float* scores, int64_t stride, int64_t rows, int64_t size, float* maxima, float* bests,
                          int64_t* ids, float* masses, int threads) {
    Team::run(rows > 1 && rows * size > WORTH_A_TEAM ? threads : 1, [&](Team& team) {
        survey(team, Scores{scores, stride, size}, rows, Survey{maxima, bests, ids, masses});
    });
}

int octavo_draw_float32(const float* scores, int64_t stride, int64_t size, const int64_t* rows, int64_t count,
                        const float* bests, const float* temperatures, const double* uniforms, int64_t each,
                        double* masses, int64_t* ids, int threads) {
    return guarded([&] {
        Scores from{scores, stride, size};
        int team_size = count > 1 && count * size > WORTH_A_TEAM ? threads : 1;
        std::vector<double> sums(team_size * (from.chunks() + 1));
        Draws draws{rows, bests, temperatures, uniforms, count, each, masses, ids};
        Team::run(team_size, [&](Team& team) { draw(team, from, draws, sums.data()); });
    });
}

OCTAVO_FOR(float, float32)
OCTAVO_FOR(bfloat16, bfloat16)
}
