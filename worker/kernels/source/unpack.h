// Converts codes of 8 or 4 bits to numbers in registers, two vectors of sixteen at a time.
#pragma once
#include "api.h"
#include "vectors.h"

typedef struct {
    vec numbers;         // of sixteen codes
    const float *table;  // of all
} codebook;

// CODE_TABLE with the codes themselves as numbers, which loading finds where `HAS_LINEAR`.
enum { CODE_LINEAR = CODE_E4M3 + 1 };
#if defined(__AVX512F__)
#define HAS_LINEAR 0   // one permutation looks up all lanes
#define HOLDS_WORDS 0  // codes are loaded again at every step, else they push scales out of the registers
#else
#define HAS_LINEAR 1
#define HOLDS_WORDS 1  // codes wait in a register, shifted by those that are taken
#endif

INLINE int code_bits(int code) { return code == CODE_TABLE || code == CODE_LINEAR ? 4 : 8; }

#if defined(__AVX512F__)
#define E4M3_UNIT 256.0f  // factor from `unpack` to the codes' numbers

INLINE __m128i sixteen_bytes(const uint8_t *from) { return _mm_loadu_si128((const void *)from); }

// An e4m3 is a half with a shorter fraction, 2^8 smaller through its exponent's offset.
INLINE vec e4m3_numbers(const uint8_t *from) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen_bytes(from)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
}

INLINE vec byte_numbers(const int code, codebook book, const uint8_t *from) {
    (void)book;
    if (code == CODE_E4M3) return e4m3_numbers(from);
    if (code == CODE_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen_bytes(from)));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen_bytes(from)));
}

INLINE vec vec_load_int8(const void *from) { return byte_numbers(CODE_INT8, (codebook){0}, from); }

typedef __m512i words;
INLINE words words_load(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE words words_shift(words a, int bits) { return _mm512_srli_epi32(a, (unsigned)bits); }
// by the lowest four bits
INLINE vec words_lookup(words a, codebook book) { return _mm512_permutexvar_ps(a, book.numbers); }
INLINE vec words_codes(words a) { return _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15))); }

INLINE vec vec_load_half(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }

#elif defined(__AVX2__)
#define E4M3_UNIT 1.0f

INLINE __m256i eight_bytes(const uint8_t *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)); }

INLINE __m256 half_of_bytes(const int code, codebook book, const uint8_t *from) {
    if (code == CODE_E4M3) return _mm256_i32gather_ps(book.table, eight_bytes(from), 4);
    if (code == CODE_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
    return _mm256_cvtepi32_ps(eight_bytes(from));
}

INLINE vec byte_numbers(const int code, codebook book, const uint8_t *from) {
    return (vec){half_of_bytes(code, book, from), half_of_bytes(code, book, from + 8)};
}

INLINE vec vec_load_int8(const void *from) { return byte_numbers(CODE_INT8, (codebook){0}, from); }

typedef struct { __m256i low, high; } words;
INLINE words words_load(const uint8_t *from) {
    return (words){_mm256_loadu_si256((const void *)from), _mm256_loadu_si256((const void *)(from + 32))};
}
INLINE words words_shift(words a, int bits) {
    return (words){_mm256_srli_epi32(a.low, bits), _mm256_srli_epi32(a.high, bits)};
}
INLINE __m256 half_lookup(codebook book, __m256i a) {
    __m256 low = _mm256_permutevar8x32_ps(book.numbers.low, a), high = _mm256_permutevar8x32_ps(book.numbers.high, a);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(a, 28)));
}
// by the lowest four bits
INLINE vec words_lookup(words a, codebook book) { return (vec){half_lookup(book, a.low), half_lookup(book, a.high)}; }
INLINE __m256 half_codes(__m256i a) { return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15))); }
INLINE vec words_codes(words a) { return (vec){half_codes(a.low), half_codes(a.high)}; }

// Moves exponent and fraction of a half into place in a float, whose exponents begin 112 lower.
INLINE __m256 half_of_halves(const void *from) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
    __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p112f));
    return _mm256_or_ps(number, _mm256_castsi256_ps(sign));
}

INLINE vec vec_load_half(const void *from) {
    return (vec){half_of_halves(from), half_of_halves((const char *)from + 16)};
}

#else
#define E4M3_UNIT 1.0f

INLINE vec byte_numbers(const int code, codebook book, const uint8_t *from) {
    float numbers[LANES];
    (void)code;
    for (int i = 0; i < LANES; i++) numbers[i] = book.table[from[i]];
    return vec_load(numbers);
}

INLINE vec vec_load_int8(const void *from) {
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = ((const int8_t *)from)[i];
    return vec_load(numbers);
}

typedef struct { quad_bits part[4]; } words;
INLINE words words_load(const uint8_t *from) { words a; memcpy(&a, from, sizeof a); return a; }
INLINE words words_shift(words a, int bits) { EACH_PART a.part[i] >>= bits; return a; }
// by the lowest four bits
INLINE vec words_lookup(words a, codebook book) {
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = book.table[a.part[i / 4][i % 4] & 15];
    return vec_load(numbers);
}
INLINE vec words_codes(words a) {
    vec numbers;
    EACH_PART numbers.part[i] = __builtin_convertvector(a.part[i] & 15, quad);
    return numbers;
}

// Moves exponent and fraction of a half into place in a float, whose exponents begin 112 lower.
INLINE vec vec_load_half(const void *from) {
    uint32_t magnitude[LANES], sign[LANES];
    for (int i = 0; i < LANES; i++) {
        uint16_t bits;
        memcpy(&bits, (const char *)from + 2 * i, sizeof bits);
        magnitude[i] = (uint32_t)(bits & 0x7fff) << 13;
        sign[i] = (uint32_t)(bits & 0x8000) << 16;
    }
    vec number = vec_mul(vec_of_bits(magnitude), vec_set(0x1p112f)), signs = vec_of_bits(sign);
    EACH_PART number.part[i] = (quad)((quad_bits)number.part[i] | (quad_bits)signs.part[i]);
    return number;
}
#endif

// Unpacks two vectors, at 2 * step and 2 * step + 1, of the span that begins at `from`. Steps come in order; `held`
// goes from one to the next.
INLINE void unpack(const int code, codebook book, const uint8_t *from, const int step, words *held, vec out[2]) {
    if (code_bits(code) == 4) {
        if (step == 0 || !HOLDS_WORDS) *held = words_load(from);
        for (int i = 0; i < 2; i++) {
            words lowest = HOLDS_WORDS ? *held : words_shift(*held, 8 * step + 4 * i);
            out[i] = code == CODE_LINEAR ? words_codes(lowest) : words_lookup(lowest, book);
            if (HOLDS_WORDS) *held = words_shift(*held, 4);
        }
    } else {
        out[0] = byte_numbers(code, book, from);
        out[1] = byte_numbers(code, book, from + LANES);
    }
}

INLINE vec load_scales(int type, const void *from) {
    if (type == SCALE_F16) return vec_load_half(from);
    return type == SCALE_BF16 ? vec_load_bf16(from) : vec_load(from);
}
