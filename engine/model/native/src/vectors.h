// As many floats at a time as a register holds, in GCC's and Clang's vector extensions.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace octavo {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#else
constexpr int LANES = 8, REGISTERS = 16;  // AVX; elsewhere the compiler makes several of each
#endif
constexpr int LINE = 64;  // bytes that memory gives at once
constexpr float LOG2E = 1.4426950408889634f;  // weights are powers of two: exp(x) is 2^(x * LOG2E)

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline Floats splat(float value) { return Floats{} + value; }
inline Ints numbers() {  // 0, 1, 2, ...
    Ints all;
    for (int i = 0; i < LANES; i++) all[i] = i;
    return all;
}
inline Floats bits_to_floats(Words bits) { return reinterpret_cast<Floats>(bits); }

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline Words load_words(const void* from) {  // by way of a register: in memory GCC would copy it in halves
    Words result;
    std::memcpy(&result, from, sizeof result);
    return result;
}
inline Floats load(const float* from) { return bits_to_floats(load_words(from)); }
inline Floats load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)  // GCC makes two halves of a conversion
    return bits_to_floats((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#else
    return bits_to_floats(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
// With what a bfloat16 has no room for in the low half, which is not 0.
inline Words rounded_above(Floats value) {
    Words bits = reinterpret_cast<Words>(value);
    Words rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even, as torch does
    Words nan = bits | 0x400000;
    Ints is_nan = value != value;
    return reinterpret_cast<Words>(is_nan ? reinterpret_cast<Ints>(nan) : reinterpret_cast<Ints>(rounded));
}
inline void store(bfloat16* to, Floats value) {
    Halves halves = __builtin_convertvector(rounded_above(value) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// What is left of a value that was stored as T and loaded again.
template <class T>
Floats rounded(Floats value);
template <>
inline Floats rounded<float>(Floats value) {
    return value;
}
template <>
inline Floats rounded<bfloat16>(Floats value) {
    return bits_to_floats(rounded_above(value) & 0xffff0000u);
}

template <class T>
inline void store_first(T* to, Floats value, int count) {
    if (count >= LANES) return store(to, value);
    alignas(64) T all[LANES];
    store(all, value);
    std::memcpy(to, all, count * sizeof(T));
}
template <class T>
inline Floats load_first(const T* from, int count) {
    if (count >= LANES) return load(from);
    alignas(64) T all[LANES] = {};
    std::memcpy(all, from, count * sizeof(T));
    return load(all);
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

#if defined(__AVX512F__)
inline bool exceeds(Floats v, float most) { return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(most), _CMP_GT_OQ); }
inline bool has_nan(Floats v) { return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q); }
inline float sum(Floats v) { return _mm512_reduce_add_ps((__m512)v); }
inline float greatest(Floats v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline bool any(Ints yes) {
#if defined(__AVX__)
    return _mm256_movemask_ps((__m256)yes);
#else
    int found = 0;
    for (int i = 0; i < LANES; i++) found |= yes[i];
    return found;
#endif
}
inline bool has_nan(Floats v) { return any(v != v); }
inline bool exceeds(Floats v, float most) { return any(v > splat(most)); }
inline float sum(Floats v) {
    float halves[LANES];
    std::memcpy(halves, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) halves[i] += halves[i + width];
    return halves[0];
}
inline float greatest(Floats v) {
    float halves[LANES];
    std::memcpy(halves, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) halves[i] = halves[i] > halves[i + width] ? halves[i] : halves[i + width];
    return halves[0];
}
#endif

// 2^x on [-1/2, 1/2]: a minimax polynomial, relative error below 2e-7.
inline Floats exp2_near_zero(Floats x) {
    Floats result = splat(1.535336188319500e-4f);
    result = result * x + 1.339887440266574e-3f;
    result = result * x + 9.618437357674640e-3f;
    result = result * x + 5.550332471162809e-2f;
    result = result * x + 2.402264791363012e-1f;
    result = result * x + 6.931472028550421e-1f;
    return result * x + 1.0f;
}

// 2^x for x <= 126; exact 0 below -126; NaN stays NaN.
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __mmask16 is_there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_there, (__m512)exp2_near_zero(x - (Floats)whole), whole);
#else
    Floats shifted = x + splat(12582912.0f);  // 1.5 * 2^23: the rounded integer falls into the low bits
    Words whole = reinterpret_cast<Words>(shifted) - 0x4b400000u;
    Floats power = exp2_near_zero(x - (shifted - splat(12582912.0f)));
    power = bits_to_floats(reinterpret_cast<Words>(power) + (whole << 23));  // of a tiny x anything: it is not taken
    return x >= splat(-126.0f) ? power : max(splat(0.0f), x);
#endif
}

// As many rows as a vector has words become columns: to[c] holds word c of every row.
inline void transpose(const Words* rows, Words* to) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = reinterpret_cast<const __m512i&>(rows[i]);
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {  // r[4 * q + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 * q to 4 * q + 3
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        reinterpret_cast<__m512i&>(to[i]) = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        reinterpret_cast<__m512i&>(to[8 + i]) = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        reinterpret_cast<__m512i&>(to[4 + i]) = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        reinterpret_cast<__m512i&>(to[12 + i]) = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
#elif defined(__AVX__)
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = reinterpret_cast<const __m256&>(rows[i]);
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)  // r[4 * i + j]: columns j and 4 + j of rows 4 * i to 4 * i + 3
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0x44);
            r[4 * i + 2 * j + 1] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        reinterpret_cast<__m256&>(to[j]) = _mm256_permute2f128_ps(r[j], r[4 + j], 0x20);
        reinterpret_cast<__m256&>(to[4 + j]) = _mm256_permute2f128_ps(r[j], r[4 + j], 0x31);
    }
#else
    for (int row = 0; row < LANES; row++)
        for (int column = 0; column < LANES; column++) to[column][row] = rows[row][column];
#endif
}

}  // namespace octavo
