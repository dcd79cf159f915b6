// The forms in which scales and offsets lie: as they are given, or in fewer bytes that give the same bits.
#pragma once
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "elementary.h"
#include "threads.h"
#include "unpack.h"

enum { TOGETHER = 8 };  // groups that may share a float, which their scales are small whole multiples of
enum { SCALE_CODES = SCALE_F32 + 1 };  // a scale type of ours: see `coded_scales`

static int scale_bytes(int type) { return type == SCALE_CODES ? 1 : type == SCALE_F32 ? 4 : 2; }

static float one_scale(int type, const void *scales, long number) {
    char sixteen[LANES * sizeof(float)] = {0};
    size_t bytes = type == SCALE_F32 ? sizeof(float) : sizeof(bf16);
    memcpy(sixteen, (const char *)scales + number * (long)bytes, bytes);
    float lanes[LANES];
    vec_store(lanes, load_scales(type, sixteen));
    return lanes[0];
}

// ---- small whole multiples of a float

static uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// A float as an odd number times two to the power that is returned; of zero 0, and any power.
static int odd_part(float number, uint32_t *odd) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    int exponent = bits >> 23 & 255;
    uint32_t digits = (bits & 0x7fffff) | (exponent ? 1u << 23 : 0);
    int zeros = digits ? __builtin_ctz(digits) : 0;
    *odd = digits >> zeros;
    return (exponent ? exponent : 1) - 150 + zeros;
}

// The unit that so many floats are small whole multiples of, to the bit, and these multiples; 0 where there is none.
static float two_levels(const float floats[TOGETHER], int8_t wholes[TOGETHER]) {
    uint32_t odd[TOGETHER], divisor = 0;
    int power[TOGETHER], least = INT_MAX;
    bool has_minus_zero = false;
    for (int i = 0; i < TOGETHER; i++) {
        power[i] = odd_part(floats[i], &odd[i]);
        if (odd[i] && power[i] < least) least = power[i];
        has_minus_zero |= floats[i] == 0.0f && signbit(floats[i]);
    }
    for (int i = 0; i < TOGETHER; i++) {
        if (odd[i] && power[i] - least > 7) return 0.0f;
        if (odd[i]) divisor = common_divisor(odd[i] << (power[i] - least), divisor);
    }
    float unit = divisor ? ldexpf((float)divisor, least) : 1.0f;
    if (has_minus_zero) unit = -unit;
    for (int i = 0; i < TOGETHER; i++) {
        float whole = floats[i] / unit, again;
        if (!(whole >= -128.0f && whole <= 127.0f)) return 0.0f;
        wholes[i] = (int8_t)whole;
        again = (float)wholes[i] * unit;
        if (memcmp(&again, &floats[i], sizeof again) != 0) return 0.0f;
    }
    return unit;
}

// Scales or offsets of a matrix: floats of all groups, or units of every TOGETHER of these and whole numbers of all.
typedef struct {
    const void *numbers;
    void *units;
    int8_t *wholes;  // NULL where all floats stand for themselves
    uint8_t *codes;  // or bytes of all, in place of these
} levels;

static void levels_free(levels *levels) {
    free(levels->units);
    free(levels->wholes);
    free(levels->codes);
    levels->units = levels->wholes = NULL;
    levels->codes = NULL;
}

// Floats of two levels, as those of Q4_K are, as such; false where they are not.
static bool split_levels(levels *levels, long count) {
    if (!levels->numbers) return true;
    levels->units = allocate_clear(sizeof(float) * (size_t)(count / TOGETHER));
    levels->wholes = allocate_clear((size_t)count);
    for (long i = 0; i < count; i += TOGETHER) {
        float unit = two_levels((const float *)levels->numbers + i, levels->wholes + i);
        if (unit == 0.0f) return false;
        ((float *)levels->units)[i / TOGETHER] = unit;
    }
    return true;
}

// ---- few fractions

enum { LEAST_EXPONENT = 1, MOST_EXPONENT = 31, EXPONENT_SHIFT = 3 };
static const uint32_t FRACTION_BITS = 0x807fffff;  // of a float, with its sign

// What scales of e4m3 times a float have in common: the first exponent, and the fractions in front of it.
typedef struct {
    uint32_t fractions[FRACTIONS];
    int count, least, most;
} fraction_book;

// The place of a float's fraction, which is added if it is new; FRACTIONS where there is no room.
static int fraction_at(fraction_book *book, uint32_t fraction) {
    int place = 0;
    while (place < book->count && book->fractions[place] != fraction) place++;
    if (place == book->count && place < FRACTIONS) book->fractions[book->count++] = fraction;
    return place;
}

static bool find_fractions(const quantized_rows *rows, long count, fraction_book *book) {
    *book = (fraction_book){.least = INT_MAX};
    for (long i = 0; i < count; i++) {
        uint32_t bits = bits_of(one_scale(rows->scale_type, rows->scales, i));
        int exponent = bits >> 23 & 255;
        if (bits == 0) continue;
        if (exponent == 0 || fraction_at(book, bits & FRACTION_BITS) == FRACTIONS) return false;
        if (exponent < book->least) book->least = exponent;
        if (exponent > book->most) book->most = exponent;
    }
    return book->count > 0 && book->most - book->least <= MOST_EXPONENT - LEAST_EXPONENT;
}

// A byte for each scale, as `coded_scales` reads it, and the floats that it has for its fractions; NULL where these are
// too many.
static uint8_t *code_scales(const quantized_rows *rows, long count, uint32_t fractions[FRACTIONS]) {
    fraction_book book;
    if (!find_fractions(rows, count, &book)) return NULL;
    int base = book.least - LEAST_EXPONENT;
    for (int i = 0; i < FRACTIONS; i++) fractions[i] = book.fractions[i] | (uint32_t)base << 23;
    uint8_t *codes = allocate_clear((size_t)count);
    for (long i = 0; i < count; i++) {
        uint32_t bits = bits_of(one_scale(rows->scale_type, rows->scales, i));
        int exponent = bits >> 23 & 255;
        if (bits) codes[i] = (uint8_t)(fraction_at(&book, bits & FRACTION_BITS) | (exponent - base) << EXPONENT_SHIFT);
    }
    return codes;
}
