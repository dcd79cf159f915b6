// Sixteen floats for any register width: the only file that knows instruction sets.
//
// Every operation gives the same bits in every build: products and sums are fused only by `fma`, sums over lanes halve
// the sixteen lanes, and of libm only `fmaf` is used, which rounds exactly.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define LOAD_AGAIN() __asm__ volatile("" ::: "memory")  // forces values to be loaded again

INLINE long round_up(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

typedef uint16_t bf16;

#if defined(__AMX_BF16__)
#define VARIANT "amx-bf16"
#elif defined(__AVX512BF16__)
#define VARIANT "avx512-bf16"
#elif defined(__AVX512F__)
#define VARIANT "avx512"
#elif defined(__AVX2__)
#define VARIANT "avx2"
#else
#define VARIANT "portable"
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 vec;

INLINE vec vec_set(float a) { return _mm512_set1_ps(a); }
INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
// a times 2^n, with n an integer in the low bits of `n`
INLINE vec vec_scale(vec a, vec n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
INLINE vec vec_load_bf16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
// the first, the second of each of sixteen pairs
INLINE vec vec_load_even(const bf16 *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE vec vec_load_odd(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
// rounds to nearest even, in the upper half of each lane
INLINE __m512i vec_bf16_bits(vec a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
INLINE void vec_store_bf16(bf16 *p, vec a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(a));  // treats subnormal numbers as zero, as products do
#else
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(vec_bf16_bits(a), 16)));
#endif
}
INLINE vec vec_round_bf16(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(vec_bf16_bits(a), _mm512_set1_epi32((int)0xffff0000)));
}

#elif defined(__AVX2__)
#include <immintrin.h>
typedef struct { __m256 low, high; } vec;

#define EACH_HALF(f, ...) ((vec){f(low, __VA_ARGS__), f(high, __VA_ARGS__)})
#define TWO(half, op, a, b) op(a.half, b.half)
INLINE vec vec_set(float a) { return (vec){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE vec vec_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void vec_store(float *p, vec a) { _mm256_storeu_ps(p, a.low), _mm256_storeu_ps(p + 8, a.high); }
INLINE vec vec_add(vec a, vec b) { return EACH_HALF(TWO, _mm256_add_ps, a, b); }
INLINE vec vec_sub(vec a, vec b) { return EACH_HALF(TWO, _mm256_sub_ps, a, b); }
INLINE vec vec_mul(vec a, vec b) { return EACH_HALF(TWO, _mm256_mul_ps, a, b); }
INLINE vec vec_div(vec a, vec b) { return EACH_HALF(TWO, _mm256_div_ps, a, b); }
INLINE vec vec_max(vec a, vec b) { return EACH_HALF(TWO, _mm256_max_ps, a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) {
    return (vec){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE __m256 half_scale(__m256 a, __m256 n) {
    __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
}
INLINE vec vec_scale(vec a, vec n) { return EACH_HALF(TWO, half_scale, a, n); }
INLINE __m256 half_load_bf16(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
INLINE vec vec_load_bf16(const bf16 *p) { return (vec){half_load_bf16(p), half_load_bf16(p + 8)}; }
INLINE __m256 half_even(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const void *)p), 16));
}
INLINE __m256 half_odd(const bf16 *p) {
    __m256i pairs = _mm256_loadu_si256((const void *)p);
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vec vec_load_even(const bf16 *p) { return (vec){half_even(p), half_even(p + 16)}; }
INLINE vec vec_load_odd(const bf16 *p) { return (vec){half_odd(p), half_odd(p + 16)}; }
INLINE __m256i half_bf16_bits(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
INLINE void vec_store_bf16(bf16 *p, vec a) {
    __m256i low = _mm256_srli_epi32(half_bf16_bits(a.low), 16), high = _mm256_srli_epi32(half_bf16_bits(a.high), 16);
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}
INLINE __m256 half_round_bf16(__m256 a) {
    return _mm256_castsi256_ps(_mm256_and_si256(half_bf16_bits(a), _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vec vec_round_bf16(vec a) { return (vec){half_round_bf16(a.low), half_round_bf16(a.high)}; }

#else
typedef float quad __attribute__((vector_size(16)));
typedef uint32_t quad_bits __attribute__((vector_size(16)));
typedef struct { quad part[4]; } vec;
#define EACH_PART for (int i = 0; i < 4; i++)
#if defined(__ARM_NEON)
#include <arm_neon.h>
INLINE quad quad_fma(quad a, quad b, quad c) { return (quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE quad quad_fma(quad a, quad b, quad c) {
    return (quad){__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                  __builtin_fmaf(a[3], b[3], c[3])};
}
#endif

INLINE vec vec_set(float a) { return (vec){{{a, a, a, a}, {a, a, a, a}, {a, a, a, a}, {a, a, a, a}}}; }
INLINE vec vec_load(const float *p) { vec a; memcpy(&a, p, sizeof a); return a; }
INLINE void vec_store(float *p, vec a) { memcpy(p, &a, sizeof a); }
INLINE vec vec_add(vec a, vec b) { EACH_PART a.part[i] += b.part[i]; return a; }
INLINE vec vec_sub(vec a, vec b) { EACH_PART a.part[i] -= b.part[i]; return a; }
INLINE vec vec_mul(vec a, vec b) { EACH_PART a.part[i] *= b.part[i]; return a; }
INLINE vec vec_div(vec a, vec b) { EACH_PART a.part[i] /= b.part[i]; return a; }
INLINE vec vec_max(vec a, vec b) {
    EACH_PART {
        quad_bits is_more = (quad_bits)(a.part[i] > b.part[i]);
        a.part[i] = (quad)(((quad_bits)a.part[i] & is_more) | ((quad_bits)b.part[i] & ~is_more));
    }
    return a;
}
INLINE vec vec_fma(vec a, vec b, vec c) { EACH_PART c.part[i] = quad_fma(a.part[i], b.part[i], c.part[i]); return c; }
INLINE vec vec_scale(vec a, vec n) {
    EACH_PART a.part[i] = (quad)((quad_bits)a.part[i] + ((quad_bits)n.part[i] << 23));
    return a;
}
INLINE vec vec_of_bits(const uint32_t *bits) { vec a; memcpy(&a, bits, sizeof a); return a; }
INLINE vec vec_load_bf16(const bf16 *p) {
    uint32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)p[i] << 16;
    return vec_of_bits(bits);
}
INLINE vec vec_load_even(const bf16 *p) {
    uint32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)p[2 * i] << 16;
    return vec_of_bits(bits);
}
INLINE vec vec_load_odd(const bf16 *p) { return vec_load_even(p + 1); }
INLINE quad_bits quad_bf16_bits(quad a) {
    quad_bits bits = (quad_bits)a;
    return bits + (((bits >> 16) & 1) + 0x7fff);
}
INLINE void vec_store_bf16(bf16 *p, vec a) {
    EACH_PART {
        quad_bits bits = quad_bf16_bits(a.part[i]) >> 16;
        for (int j = 0; j < 4; j++) p[4 * i + j] = (bf16)bits[j];
    }
}
INLINE vec vec_round_bf16(vec a) {
    EACH_PART a.part[i] = (quad)(quad_bf16_bits(a.part[i]) & 0xffff0000);
    return a;
}
#endif

INLINE float vec_sum(vec a) {
    float lane[LANES];
    vec_store(lane, a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

INLINE float vec_max_lane(vec a) {
    float lane[LANES];
    vec_store(lane, a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

INLINE vec horner(vec x, const float *coefficients, int count) {
    vec sum = vec_set(coefficients[0]);
    for (int i = 1; i < count; i++) sum = vec_fma(sum, x, vec_set(coefficients[i]));
    return sum;
}

#define ROUNDER 12582912.0f  // 1.5 * 2^23: adding it rounds to an integer, in the low bits

// 2^x for x from -126 to slightly above 0; lower x count as -126
INLINE vec vec_exp2(vec x) {
    static const float SERIES[] = {0.0013218672247603536f, 0.009671698324382305f, 0.05550893023610115f,
                                   0.24022237956523895f, 0.6931468844413757f, 1.0f};
    x = vec_max(vec_set(-126.0f), x);  // keeps NaN: vec_max returns its second operand then
    vec whole = vec_add(x, vec_set(ROUNDER));
    vec rest = vec_sub(x, vec_sub(whole, vec_set(ROUNDER)));
    return vec_scale(horner(rest, SERIES, 6), whole);
}

// e^x for x from -87 to 0; lower x count as -87
INLINE vec vec_exp(vec x) {
    static const float SERIES[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                   4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    x = vec_max(x, vec_set(-87.0f));
    vec whole = vec_fma(x, vec_set(1.44269504088896341f), vec_set(ROUNDER));
    vec n = vec_sub(whole, vec_set(ROUNDER));
    vec rest = vec_fma(n, vec_set(-0.693145751953125f), x);
    rest = vec_fma(n, vec_set(-1.42860682030941723212e-6f), rest);
    vec tail = vec_mul(horner(rest, SERIES, 6), rest);
    return vec_scale(vec_add(vec_fma(tail, rest, rest), vec_set(1.0f)), whole);
}

INLINE float exp2_of(float x) {
    float lane[LANES];
    vec_store(lane, vec_exp2(vec_set(x)));
    return lane[0];
}
