// Converts codes of 8 or 4 bits to numbers in registers, two vectors of sixteen at a time.
#pragma once
#include "api.h"
#include "vectors.h"

typedef struct {
    vec numbers;           // of sixteen codes
    const float *table;    // of all
    const int8_t *wholes;  // of sixteen, where HAS_WHOLES
} codebook;

// CODE_TABLE with the codes themselves as numbers, which loading finds where `HAS_LINEAR`.
enum { CODE_LINEAR = CODE_E4M3 + 1 };
#if defined(__AVX512F__)
enum { HAS_LINEAR = false };  // one permutation looks up all lanes
#else
enum { HAS_LINEAR = true };
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
enum { HAS_WHOLES = true };  // a table's numbers are looked up in multiples of its unit, which are bytes
#else
enum { HAS_WHOLES = false };
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
// Loads the codes again at every step, else they would push scales out of the registers.
INLINE void unpack_halves(const int code, codebook book, const uint8_t *from, const int step, words held[2], vec out[2]) {
    (void)code, (void)held;
    words all = _mm512_loadu_si512(from);
    for (int i = 0; i < 2; i++)
        out[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(all, (unsigned)(8 * step + 4 * i)), book.numbers);
}

INLINE vec vec_load_half(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }

#elif defined(__AVX2__)
#define E4M3_UNIT 256.0f

// An e4m3 is a half with a shorter fraction, 2^8 smaller through its exponent's offset.
INLINE __m128i halves_of_e4m3(__m128i codes) {
    return _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xbfff));
}

INLINE __m128i eight_bytes(const uint8_t *from) { return _mm_loadl_epi64((const void *)from); }

INLINE __m256 half_of_bytes(const int code, const uint8_t *from) {
    if (code == CODE_E4M3) return _mm256_cvtph_ps(halves_of_e4m3(_mm_cvtepi8_epi16(eight_bytes(from))));
    if (code == CODE_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(from)));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(from)));
}

INLINE vec byte_numbers(const int code, codebook book, const uint8_t *from) {
    (void)book;
    return (vec){half_of_bytes(code, from), half_of_bytes(code, from + 8)};
}

INLINE vec vec_load_int8(const void *from) { return byte_numbers(CODE_INT8, (codebook){0}, from); }

typedef struct { __m256i low, high; } words;
#define EACH_WORDS(f, a, ...) ((words){f((a).low, __VA_ARGS__), f((a).high, __VA_ARGS__)})
INLINE __m256 half_codes(__m256i a) { return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15))); }
// of the lower halves of all bytes
INLINE __m256i half_lookup(__m256i a, codebook book) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)book.wholes));
    return _mm256_shuffle_epi8(both, _mm256_and_si256(a, _mm256_set1_epi8(15)));
}
INLINE __m256 half_byte(__m256i a, int place) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * place), 24));
}

// Holds the codes, shifted by those that are taken, or of a table all first and all second numbers of the bytes.
INLINE void unpack_halves(const int code, codebook book, const uint8_t *from, const int step, words held[2], vec out[2]) {
    if (step == 0) {
        const __m256i *all = (const void *)from;
        held[0] = (words){_mm256_loadu_si256(all), _mm256_loadu_si256(all + 1)};
        if (code == CODE_TABLE) {
            held[1] = EACH_WORDS(_mm256_srli_epi32, held[0], 4);
            for (int i = 0; i < 2; i++) held[i] = EACH_WORDS(half_lookup, held[i], book);
        }
    }
    for (int i = 0; i < 2; i++) {
        words all = held[code == CODE_TABLE ? i : 0];
        if (code == CODE_TABLE) out[i] = (vec){half_byte(all.low, step), half_byte(all.high, step)};
        else out[i] = (vec){half_codes(all.low), half_codes(all.high)}, held[0] = EACH_WORDS(_mm256_srli_epi32, all, 4);
    }
}

INLINE vec vec_load_half(const void *from) {
    const __m128i *halves = from;
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
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
// Holds the codes, shifted by those that are taken.
INLINE void unpack_halves(const int code, codebook book, const uint8_t *from, const int step, words held[2], vec out[2]) {
    if (step == 0) memcpy(held, from, sizeof *held);
    for (int n = 0; n < 2; n++) {
        out[n] = code == CODE_LINEAR ? words_codes(held[0]) : words_lookup(held[0], book);
        EACH_PART held[0].part[i] >>= 4;
    }
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
INLINE void unpack(const int code, codebook book, const uint8_t *from, const int step, words held[2], vec out[2]) {
    if (code_bits(code) == 4) {
        unpack_halves(code, book, from, step, held, out);
    } else {
        out[0] = byte_numbers(code, book, from);
        out[1] = byte_numbers(code, book, from + LANES);
    }
}

INLINE vec load_scales(int type, const void *from) {
    if (type == SCALE_F16) return vec_load_half(from);
    return type == SCALE_BF16 ? vec_load_bf16(from) : vec_load(from);
}
