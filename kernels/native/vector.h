/* Sixteen float32 numbers at a time, on whatever registers the machine has.

   Owns: the arithmetic whose rounding is the same in every loop, and bfloat16 as it is stored.
   Does not know: any operation.
   Idea: a row's bits are its own if each of its sums is one chain of these steps in one order,
   whatever is computed beside it.  The compiler may fuse nothing by itself (-ffp-contract=off), so
   what is fused is said here. */

#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 16
#define HIDE(x) __asm__("" : "+r"(x)) /* the compiler knows x no more */

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t half16 __attribute__((vector_size(32)));

typedef enum { FLOAT32, BFLOAT16 } Dtype;

INLINE long size_of(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE v16 load(const float *from) {
    v16 x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, v16 x) { memcpy(to, &x, sizeof x); }

/* Sixteen copies of the four bytes at `from`: a float, or a pair of bfloat16. */
INLINE v16 splat(const void *from) {
    float x;
    memcpy(&x, from, sizeof x);
    return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

INLINE v16 all(float x) { return splat(&x); }

INLINE v16 widen(half16 x) { return (v16)(__builtin_convertvector(x, u16) << 16); }

/* Round to the nearest bfloat16, to the even one of two; a NaN stays one.  The instruction takes
   numbers below the smallest normal one for 0. */
INLINE half16 narrow(v16 x) {
#if defined(__AVX512BF16__)
    return (half16)_mm512_cvtneps_pbh((__m512)x);
#else
    u16 bits = (u16)x, nan = (u16)(x != x);
    u16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    u16 chosen = (nan & (bits | 0x400000)) | (~nan & rounded);
    return __builtin_convertvector(chosen >> 16, half16);
#endif
}

/* Sixteen numbers as float32. */
INLINE v16 load_as(Dtype dtype, const void *from) {
    if (dtype == FLOAT32) return load(from);
    half16 x;
    memcpy(&x, from, sizeof x);
    return widen(x);
}

INLINE void store_as(Dtype dtype, void *to, v16 x) {
    if (dtype == FLOAT32) {
        store(to, x);
        return;
    }
    half16 y = narrow(x);
    memcpy(to, &y, sizeof y);
}

/* `count` numbers, at most sixteen that count; the lanes beyond are 0. */
INLINE v16 load_some(Dtype dtype, const void *from, long count) {
    if (count >= LANES) return load_as(dtype, from); /* a copy of a fixed size is one instruction */
    char padded[LANES * 4] = {0};
    memcpy(padded, from, (size_t)(count * size_of(dtype)));
    return load_as(dtype, padded);
}

INLINE void store_some(Dtype dtype, void *to, v16 x, long count) {
    if (count >= LANES) {
        store_as(dtype, to, x);
        return;
    }
    char padded[LANES * 4];
    store_as(dtype, padded, x);
    memcpy(to, padded, (size_t)(count * size_of(dtype)));
}

/* Round as storing in `dtype` does, and go on in float32. */
INLINE v16 rounded(Dtype dtype, v16 x) { return dtype == FLOAT32 ? x : widen(narrow(x)); }

/* a · b + c, rounded once; twice on machines without the instruction. */
INLINE v16 fma16(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

/* total + a₀ · b₀ + a₁ · b₁ in each lane, of pairs of bfloat16. */
INLINE v16 dot_pairs(v16 total, v16 a, v16 b) {
#if defined(__AVX512BF16__)
    return (v16)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    u16 high = {0};
    high = ~high << 16;
    total = fma16((v16)((u16)a << 16), (v16)((u16)b << 16), total);
    return fma16((v16)((u16)a & high), (v16)((u16)b & high), total);
#endif
}

INLINE v16 choose(i16 where, v16 yes, v16 no) {
    return (v16)((where & (i16)yes) | (~where & (i16)no));
}

INLINE v16 max16(v16 a, v16 b) { return choose(a > b, a, b); }

/* e to the power of x, within 2 units in the last place.  0 below -86, infinite above 88, and a NaN
   stays.
   Source: Cody and Waite's reduction by ln 2 in two parts, and a polynomial of degree 6. */
INLINE v16 exp16(v16 x) {
    v16 shift = all(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    v16 n = fma16(x, all(1.44269504f), shift);
    i16 exponent = (i16)n << 23;
    n -= shift;
    v16 r = fma16(n, all(-0.693359375f), x);
    r = fma16(n, all(2.12194440e-4f), r);
    v16 p = all(1.0f / 720);
    p = fma16(p, r, all(1.0f / 120));
    p = fma16(p, r, all(1.0f / 24));
    p = fma16(p, r, all(1.0f / 6));
    p = fma16(p, r, all(0.5f));
    p = fma16(p, r, all(1.0f));
    p = fma16(p, r, all(1.0f));
    v16 power = choose(x < all(-86.0f), (v16){0}, (v16)((i16)p + exponent));
    power = choose(x > all(88.0f), all(__builtin_inff()), power);
    return choose(x != x, x, power);
}

/* The sum of all lanes, by one tree. */
INLINE float sum16(v16 x) {
    float y[LANES];
    store(y, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) y[i] += y[i + width];
    return y[0];
}
