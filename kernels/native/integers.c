/* Products of integers: rows rounded to 8 bits, times quantised weights.

   Owns: how a row is rounded, and the integer sums.  Does not know: how items are dealt out.
   Idea: a block's sum of integers is exact in any order; the blocks' values, in float32, are one
   chain.  So the result is batch-invariant, and targets with a fused multiply-add agree on it.

       x ≈ q · scale, 32 inputs at a time, q from -127 to 127 */

#include <stddef.h>

#include "formats.h"

#define ROWS 4       /* of x that meet a word of weights in registers */
#define ITEM_ROWS 4  /* that one item rounds */

#if defined(__AVX512VNNI__) && LANES == 16
#define SIGNED 0
INLINE ivec dot_bytes(ivec total, uvec w, uvec x) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__) && LANES == 8
#define SIGNED 0
INLINE ivec dot_bytes(ivec total, uvec w, uvec x) {
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__) && LANES == 8
#define SIGNED 1 /* products of two whole bytes overflow 16 bits unless the weight is signed */
INLINE __m256i add_pairs(uvec w, uvec x, int is_signed) {
    __m256i q = (__m256i)w, y = (__m256i)x;
    return is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(y, q))
                     : _mm256_maddubs_epi16(q, y);
}
INLINE ivec widen_pairs(ivec total, __m256i pairs) {
    return total + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE ivec dot_bytes(ivec total, uvec w, uvec x) { return widen_pairs(total, add_pairs(w, x, 1)); }
#elif defined(__ARM_FEATURE_DOTPROD) && LANES == 4
#define SIGNED 1
INLINE ivec dot_bytes(ivec total, uvec w, uvec x) {
    return (ivec)vdotq_s32((int32x4_t)total, (int8x16_t)w, (int8x16_t)x);
}
#else
#define SIGNED 1
INLINE ivec dot_bytes(ivec total, uvec w, uvec x) {
    UNROLL
    for (int j = 24; j >= 0; j -= 8) total += ((ivec)(w << j) >> 24) * ((ivec)(x << j) >> 24);
    return total;
}
#endif

static long row_bytes(long inputs) { return inputs + inputs / BLOCK * 3 * (long)sizeof(float); }

static RoundedRow rounded_row(const Product *p, long row) {
    long inputs = p->matrix->inputs;
    char *at = p->rounded + row * row_bytes(inputs);
    float *scales = (float *)(at + inputs);
    return (RoundedRow){(int8_t *)at, scales, scales + inputs / BLOCK};
}

long radixcache_rounded_bytes(long inputs) { return row_bytes(inputs); }

long rounding_items(const Product *p) { return (p->rows + ITEM_ROWS - 1) / ITEM_ROWS; }

/* Round a block, to the nearest and to even of two. */
INLINE void round_block(Dtype dtype, const char *x, long block, RoundedRow to) {
    const char *from = x + block * BLOCK * size_of(dtype);
    vec value[BLOCK / LANES], most = {0};
    UNROLL
    for (int i = 0; i < BLOCK / LANES; i++) {
        value[i] = load_as(dtype, from + i * LANES * size_of(dtype));
        most = larger(larger(value[i], -value[i]), most);
    }
    float peak = largest_lane(most)[0], inverse = peak > 0 ? 127.0f / peak : 0.0f;
    vec shift = all(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    float sums[2] = {0, 0};
    UNROLL
    for (int i = 0; i < BLOCK / LANES; i++) {
        vec whole = fma_vec(value[i], all(inverse), shift) - shift;
        ivec q = __builtin_convertvector(whole, ivec);
        signed_bytes narrow_q = __builtin_convertvector(q, signed_bytes);
        memcpy(to.q + block * BLOCK + i * LANES, &narrow_q, sizeof narrow_q);
        sums[i * LANES / (BLOCK / 2)] += sum_of_lanes(whole)[0]; /* integers: exact */
    }
    to.scales[block] = peak / 127.0f + 0 * (sums[0] + sums[1]); /* a NaN where a number is none */
    memcpy(to.sums + 2 * block, sums, sizeof sums);
}

/* An item is a few rows. */
void round_rows(const void *what, long item, int thread) {
    (void)thread;
    const Product *p = what;
    long end = (item + 1) * ITEM_ROWS < p->rows ? (item + 1) * ITEM_ROWS : p->rows;
    for (long row = item * ITEM_ROWS; row < end; row++) {
        const char *x = p->x + row * p->x_stride;
        RoundedRow to = rounded_row(p, row);
        for (long block = 0; block < p->matrix->inputs / BLOCK; block++) {
            if (p->dtype == FLOAT32) round_block(FLOAT32, x, block, to);
            else round_block(BFLOAT16, x, block, to);
        }
    }
}

/* Four inputs of some outputs, a byte each: number `four` of the eight in a block. */
INLINE uvec bytes_of(const Shape *s, const char *words, int four) {
    long row = PANEL * 4;
    if (s->bits == 8) {
        uvec word = load_words(words + four * row);
        return SIGNED ? word ^ 0x80808080u : word;
    }
    uvec q = load_words(words + four / 2 * row) >> four % 2 * 4 & 0x0f0f0f0fu;
    if (s->bits == 5) {
        uvec bits = load_words(words + 4 * row) >> 4 * four & 15;
        q |= (bits | bits << 7 | bits << 14 | bits << 21) << 4 & 0x10101010u;
    }
    if (s->bits == 6) {
        uvec bits = load_words(words + (4 + four / 4) * row) >> four % 4 * 8 & 255;
        q |= (bits | bits << 6 | bits << 12 | bits << 18) << 4 & 0x30303030u;
    }
    return q;
}

/* Whether bytes of weights come signed, with their zero taken off. */
#define COMES_SIGNED(s) (SIGNED && (s)->bits == 8)

/* The integer sums of half a block, or of a whole one, of some rows. */
INLINE void sum_block(const Shape *s, const char *words, int rows, const RoundedRow *x, long block,
                      int first, int count, ivec *total) {
#if defined(__AVX2__) && LANES == 8 && !defined(__AVXVNNI__)
    __m256i pairs[ROWS];
    const int fit = s->bits == 4 ? 8 : s->bits == 5 ? 4 : s->bits == 6 ? 2 : 1; /* in 16 bits */
    UNROLL
    for (int four = first; four < first + count; four++) {
        uvec w = bytes_of(s, words, four);
        UNROLL
        for (int i = 0; i < rows; i++) {
            uvec value = (uvec)splat(x[i].q + block * BLOCK + 4 * four);
            __m256i next = add_pairs(w, value, s->bits == 8);
            pairs[i] = (four - first) % fit ? _mm256_add_epi16(pairs[i], next) : next;
            if ((four - first) % fit == fit - 1) total[i] = widen_pairs(total[i], pairs[i]);
        }
    }
#else
    UNROLL
    for (int four = first; four < first + count; four++) {
        uvec w = bytes_of(s, words, four);
        UNROLL
        for (int i = 0; i < rows; i++)
            total[i] = dot_bytes(total[i], w, (uvec)splat(x[i].q + block * BLOCK + 4 * four));
    }
#endif
}

/* A few rows times LANES outputs of a panel. */
INLINE void multiply_lanes(const Shape *s, const char *panel, long blocks, int rows,
                           const RoundedRow *x, long lane, float *sums) {
    vec total[ROWS];
    UNROLL
    for (int i = 0; i < rows; i++) total[i] = load(sums + i * PANEL);
    for (long b = 0; b < blocks; b++) {
        const char *above, *block = find_block(s, panel, b, &above);
        Scales by = block_scales(s, block, above, lane);
        UNROLL
        for (int half = 0; half < s->scales; half++) {
            ivec sum[ROWS] = {0};
            int count = 8 / s->scales;
            sum_block(s, words_of(s, block) + 4 * lane, rows, x, b, half * count, count, sum);
            UNROLL
            for (int i = 0; i < rows; i++) {
                const float *halves_of = x[i].sums + 2 * b;
                float of_row = s->scales == 2 ? halves_of[half] : halves_of[0] + halves_of[1];
                vec value = __builtin_convertvector(sum[i], vec);
                if (s->zero && !COMES_SIGNED(s)) value -= all((float)s->zero * of_row);
                float scale = x[i].scales[b];
                total[i] = fma_vec(value, by.scale[half] * all(scale), total[i]);
                if (s->minimum) total[i] = fma_vec(by.minimum, all(scale * of_row), total[i]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) store(sums + i * PANEL, total[i]);
}

INLINE void multiply_shape(const Shape *s, const char *panel, long blocks, int rows,
                           const RoundedRow *x, float *sums) {
    for (long lane = 0; lane < PANEL; lane += LANES) {
        if (rows == ROWS) multiply_lanes(s, panel, blocks, ROWS, x, lane, sums + lane);
        else
            for (int i = 0; i < rows; i++)
                multiply_lanes(s, panel, blocks, 1, x + i, lane, sums + i * PANEL + lane);
    }
}

typedef void Multiply(const char *panel, long blocks, int rows, const RoundedRow *x, float *sums);

#define LOOPS(name) \
    static void multiply_##name(const char *panel, long blocks, int rows, const RoundedRow *x, \
                                float *sums) { \
        const Shape shape = {SHAPE_##name}; \
        multiply_shape(&shape, panel, blocks, rows, x, sums); \
    }
EACH_QUANTISED(LOOPS)

#define MULTIPLIES(name) [name] = multiply_##name,
static Multiply *const multiplies[NUM_FORMATS] = {EACH_QUANTISED(MULTIPLIES)};

void multiply_rounded(const Product *p, const Part *part, long panel, long start, long rows,
                      float *sums) {
    long inputs = p->matrix->inputs;
    const char *from = part->packed + panel * panel_bytes((Format)part->format, inputs);
    for (long first = 0; first < rows; first += ROWS) {
        int count = rows - first < ROWS ? (int)(rows - first) : ROWS;
        RoundedRow x[ROWS];
        for (int i = 0; i < count; i++) x[i] = rounded_row(p, start + first + i);
        multiplies[part->format](from, inputs / BLOCK, count, x, sums + first * PANEL);
    }
}
