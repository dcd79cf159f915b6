// Logarithms, exponentials and bits of numbers without libm: the same results from every compiler and instruction set.
#pragma once
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define BLOCK 64  // tokens processed together: sixteen counters of noise

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE uint64_t bits_of_double(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// e^y - 1 for y from -20 to 20, accurate near 0: y = n log 2 + rest, and e^rest - 1 is a series without the 1.
INLINE vec vec_expm1(vec y) {
    static const float SERIES[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
    vec whole = vec_fma(y, vec_set(1.44269504088896341f), vec_set(ROUNDER)), n = vec_sub(whole, vec_set(ROUNDER));
    vec rest = vec_fma(n, vec_set(-0.693145751953125f), y);
    rest = vec_fma(n, vec_set(-1.42860682030941723212e-6f), rest);
    vec series = vec_fma(vec_mul(horner(rest, SERIES, 6), rest), rest, rest);
    vec one = vec_set(1.0f), power = vec_scale(one, whole);
    return vec_fma(series, power, vec_sub(power, one));
}

// tanh(x), with an error of at most three units in the last place; |x| is clamped to 10.
// With y = -2 x it is (1 - e^y) / (1 + e^y), from e^y - 1.
INLINE vec vec_tanh(vec x) {
    x = vec_max(vec_set(-10.0f), x);  // keeps NaN: vec_max returns its second operand then
    vec y = vec_mul(vec_max(vec_set(-10.0f), vec_sub(vec_set(0.0f), x)), vec_set(2.0f));
    vec less = vec_expm1(y);
    return vec_div(vec_sub(vec_set(0.0f), less), vec_add(vec_set(2.0f), less));
}

INLINE int is_nan_bits(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

// An integer that orders floats: both zeros are equal, and NaN is the highest.
INLINE uint32_t order_of(float x) {
    uint32_t bits = bits_of(x + 0.0f);
    if (is_nan_bits(bits)) return UINT32_MAX;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Natural logarithm of a positive normal number, with an error of at most one unit in the last place.
//
// x = 2^k (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); log(1 + f) = 2 artanh(s) with s = f / (2 + f), by the
// series of artanh. 2 s = f - s f lets the exact f be added last. Integers become doubles through their bits, since few
// instruction sets have the conversion: so loops are vectorised.
INLINE double log_of(double x) {
    const uint64_t ONE = 0x3ff0000000000000, ROOT_HALF = 0x3fe6a09e667f3bcd, TWO_52 = 0x4330000000000000;
    uint64_t bits = bits_of_double(x) - ROOT_HALF + ONE;
    double k = double_of((bits >> 52) | TWO_52) - (4503599627370496.0 + 1023.0);
    double f = double_of((bits & 0x000fffffffffffff) + ROOT_HALF) - 1.0;
    double s = f / (2.0 + f), z = s * s, half_square = 0.5 * f * f;
    double series = 2.0 / 21;
    series = series * z + 2.0 / 19;
    series = series * z + 2.0 / 17;
    series = series * z + 2.0 / 15;
    series = series * z + 2.0 / 13;
    series = series * z + 2.0 / 11;
    series = series * z + 2.0 / 9;
    series = series * z + 2.0 / 7;
    series = series * z + 2.0 / 5;
    series = series * z + 2.0 / 3;
    series = series * z;
    // log 2 in two parts; the first has 32 bits, so its product with k is exact
    double low = s * (half_square + series) + k * 1.9082149292705877e-10;
    return k * 0.6931471803691238 - ((half_square - low) - f);
}

// e^x for x up to 700, with an error of at most two units in the last place; x below -700, and NaN, count as -700.
//
// x = n log 2 + rest, with the rest between -log(2) / 2 and log(2) / 2, by Taylor's series.
INLINE double exp_of(double x) {
    const double ROUNDER_52 = 6755399441055744.0;  // 1.5 * 2^52, as ROUNDER for floats
    x = x > -700.0 ? x : -700.0;
    double whole = x * 1.4426950408889634 + ROUNDER_52, n = whole - ROUNDER_52;
    double rest = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    double series = 1.0 / 6227020800;
    series = series * rest + 1.0 / 479001600;
    series = series * rest + 1.0 / 39916800;
    series = series * rest + 1.0 / 3628800;
    series = series * rest + 1.0 / 362880;
    series = series * rest + 1.0 / 40320;
    series = series * rest + 1.0 / 5040;
    series = series * rest + 1.0 / 720;
    series = series * rest + 1.0 / 120;
    series = series * rest + 1.0 / 24;
    series = series * rest + 1.0 / 6;
    series = series * rest + 0.5;
    double power = 1.0 + (rest + series * rest * rest);
    return double_of(bits_of_double(power) + (bits_of_double(whole) << 52));
}

// e^x, but NaN for NaN and for x above 700, so that damaged weights show.
INLINE double exp_or_nan(double x) { return x <= 700.0 ? exp_of(x) : __builtin_nan(""); }
