/* Vectors of float32 as wide as the target's registers.

   Owns: the arithmetic whose rounding is the same in every loop, and how bfloat16 and float16 are
   stored.  Does not know: any operation.
   Idea: an operation is batch-invariant if each of its sums is one chain of these steps in one
   order, whatever else is computed beside it.  Lanes hold different sums, so their number changes
   no bit.  The compiler may fuse nothing by itself (-ffp-contract=off): what is fused is said here.

       target            LANES   registers   fused multiply-add
       AVX-512           16      32          yes
       AVX2 + FMA        8       16          yes
       NEON              4       32          yes
       SSE2, and others  4       16          no: multiplied, rounded, added */

#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(LANES) /* a test compiles for more lanes than the registers have */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(PAIRS) /* a test multiplies pairs without the instruction */
#elif defined(__AVX512BF16__) && LANES == 16
#define PAIRS 1 /* two bfloat16 are multiplied and added in one instruction */
#else
#define PAIRS 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define HIDE(x) __asm__("" : "+r"(x)) /* the compiler knows x no more */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));

typedef enum { FLOAT32, BFLOAT16 } Dtype;

INLINE long size_of(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE vec load(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

/* Copies in all lanes of the four bytes at `from`: a float, or a pair of bfloat16. */
INLINE vec splat(const void *from) {
    float x;
    memcpy(&x, from, sizeof x);
#if LANES == 16
    return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif LANES == 8
    return (vec){x, x, x, x, x, x, x, x};
#else
    return (vec){x, x, x, x};
#endif
}

INLINE vec all(float x) { return splat(&x); }

/* The number of each lane. */
INLINE ivec lane_numbers(void) {
    ivec lanes;
    UNROLL
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

INLINE vec widen(halves x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

/* Round to the nearest bfloat16, to the even one of two; a NaN stays one.  The instruction takes
   numbers below the smallest normal one for 0. */
INLINE halves narrow(vec x) {
#if defined(__AVX512BF16__) && LANES == 16
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x, nan = (uvec)(x != x);
    uvec rounded = bits + 0x7fff + ((bits >> 16) & 1);
    uvec chosen = ((nan & (bits | 0x400000)) | (~nan & rounded)) >> 16;
#if defined(__AVX2__) && LANES == 8 /* the compiler takes four instructions more */
    __m256i packed = _mm256_packus_epi32((__m256i)chosen, (__m256i)chosen);
    return (halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(chosen, halves);
#endif
#endif
}

/* float16 numbers, each in the low half of its lane, as float32; exact.  Not for infinities. */
INLINE vec from_float16(uvec half) {
    vec magnitude = (vec)((half & 0x7fff) << 13) * all(0x1p112f);
    return (vec)((uvec)magnitude | (half & 0x8000) << 16);
}

INLINE vec load_float16(const void *from) {
    halves x;
    memcpy(&x, from, sizeof x);
#if defined(__F16C__) && LANES == 8
    return (vec)_mm256_cvtph_ps((__m128i)x);
#else
    return from_float16(__builtin_convertvector(x, uvec));
#endif
}

/* As many numbers as there are lanes, as float32. */
INLINE vec load_as(Dtype dtype, const void *from) {
    if (dtype == FLOAT32) return load(from);
    halves x;
    memcpy(&x, from, sizeof x);
    return widen(x);
}

INLINE void store_as(Dtype dtype, void *to, vec x) {
    if (dtype == FLOAT32) {
        store(to, x);
        return;
    }
    halves y = narrow(x);
    memcpy(to, &y, sizeof y);
}

/* The first `count` numbers, at least one; the lanes beyond are 0. */
INLINE vec load_some(Dtype dtype, const void *from, long count) {
    if (count >= LANES) return load_as(dtype, from); /* a copy of a fixed size is one instruction */
    char padded[LANES * 4] = {0};
    memcpy(padded, from, (size_t)(count * size_of(dtype)));
    return load_as(dtype, padded);
}

INLINE void store_some(Dtype dtype, void *to, vec x, long count) {
    if (count >= LANES) {
        store_as(dtype, to, x);
        return;
    }
    char padded[LANES * 4];
    store_as(dtype, padded, x);
    memcpy(to, padded, (size_t)(count * size_of(dtype)));
}

/* Round as storing in `dtype` does, and go on in float32. */
INLINE vec rounded(Dtype dtype, vec x) { return dtype == FLOAT32 ? x : widen(narrow(x)); }

/* a · b + c, rounded once; twice on targets without the instruction. */
INLINE vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && LANES == 4
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__)
    UNROLL
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* total + a₀ · b₀ + a₁ · b₁ in each lane, of pairs of bfloat16. */
INLINE vec dot_pairs(vec total, vec a, vec b) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    total = fma_vec((vec)((uvec)a << 16), (vec)((uvec)b << 16), total);
    return fma_vec((vec)((uvec)a & 0xffff0000u), (vec)((uvec)b & 0xffff0000u), total);
#endif
}

INLINE vec choose(ivec where, vec yes, vec no) {
#if defined(__AVX2__) && LANES == 8
    return (vec)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)where);
#else
    return (vec)((where & (ivec)yes) | (~where & (ivec)no));
#endif
}

/* The larger in each lane; b where one is a NaN. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* e to the power of x, within 2 units in the last place.  0 below -86, infinite above 88, and a NaN
   stays.
   Source: Cody and Waite's reduction by ln 2 in two parts, and a polynomial of degree 6. */
INLINE vec exp_vec(vec x) {
    vec shift = all(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    vec n = fma_vec(x, all(1.44269504f), shift);
    ivec exponent = (ivec)n << 23;
    n -= shift;
    vec r = fma_vec(n, all(-0.693359375f), x);
    r = fma_vec(n, all(2.12194440e-4f), r);
    vec p = all(1.0f / 720);
    p = fma_vec(p, r, all(1.0f / 120));
    p = fma_vec(p, r, all(1.0f / 24));
    p = fma_vec(p, r, all(1.0f / 6));
    p = fma_vec(p, r, all(0.5f));
    p = fma_vec(p, r, all(1.0f));
    p = fma_vec(p, r, all(1.0f));
    vec power = choose(x < all(-86.0f), (vec){0}, (vec)((ivec)p + exponent));
    power = choose(x > all(88.0f), all(__builtin_inff()), power);
    return choose(x != x, x, power);
}

/* Lane i of the result is lane i ^ distance. */
INLINE vec swap_lanes(vec x, int distance) {
    return __builtin_shuffle(x, lane_numbers() ^ distance);
}

/* The sum of all lanes, in each, by one tree: halves, quarters, … are added to each other. */
INLINE vec sum_of_lanes(vec x) {
    if (LANES > 8) x += swap_lanes(x, 8);
    if (LANES > 4) x += swap_lanes(x, 4);
    x += swap_lanes(x, 2);
    return x + swap_lanes(x, 1);
}

/* The largest of all lanes, in each. */
INLINE vec largest_lane(vec x) {
    if (LANES > 8) x = larger(x, swap_lanes(x, 8));
    if (LANES > 4) x = larger(x, swap_lanes(x, 4));
    x = larger(x, swap_lanes(x, 2));
    return larger(x, swap_lanes(x, 1));
}

/* The sum, in each lane, of `count` vectors: a power of two.  The tree is that of `sum_of_lanes`
   over count · LANES numbers, so targets agree on its bits. */
INLINE vec sum_of_vectors(int count, vec *x) {
    UNROLL
    for (int half = count / 2; half; half /= 2) {
        UNROLL
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return sum_of_lanes(x[0]);
}
