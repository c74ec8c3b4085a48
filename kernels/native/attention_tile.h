/* One tile of keys against a few rows of queries.

   Owns: the arithmetic of attention: the order of every sum, and what hides a key.
   Does not know: sequences, blocks, or who computes what.
   Idea: a score is one chain over the numbers of a head, an output one chain over the keys, each in
   a lane of its own.  How many rows and columns go side by side is a matter of registers alone. */

#pragma once

#include "vector.h"

#define TILE 64 /* keys that share a largest score; part of the arithmetic */
#define MAX_ROWS 6
#if defined(__AVX512F__)
#define COLUMNS 4 /* vectors of sums of each row: 24 registers of 32 */
#else
#define COLUMNS 1
#endif
#define MAX_DIM 256
#define LOWEST (-__builtin_inff())

/* The larger in each lane; b where one is no number. */
#if defined(__AVX512F__)
INLINE v16 larger(v16 a, v16 b) { return (v16)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE v16 larger(v16 a, v16 b) { return choose(a > b, a, b); }
#endif

/* 2 to the power of x, for x of at most 0: 1 of 0, and 0 below -126.5; a NaN stays one.
   Source: a polynomial of degree 6, fitted to the relative error: 2e-9 before rounding. */
INLINE v16 exp2_16(v16 x) {
    x = larger(all(-127.0f), x);
    v16 shift = all(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    v16 n = x + shift;
    v16 power = (v16)(((i16)n << 23) + (127 << 23)); /* 0 of -127 */
    v16 r = x - (n - shift);
    v16 p = all(1.5353362e-4f);
    p = fma16(p, r, all(1.33988739e-3f));
    p = fma16(p, r, all(9.61843692e-3f));
    p = fma16(p, r, all(5.55033237e-2f));
    p = fma16(p, r, all(2.40226477e-1f));
    p = fma16(p, r, all(6.93147182e-1f));
    p = fma16(p, r, all(1.0f));
    return p * power;
}

INLINE v16 swap_halves(v16 x) {
    return __builtin_shuffle(x, (i16){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
}

INLINE v16 swap_quarters(v16 x) {
    return __builtin_shuffle(x, (i16){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
}

INLINE v16 swap_pairs(v16 x) {
    return __builtin_shuffle(x, (i16){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
}

INLINE v16 swap_lanes(v16 x) {
    return __builtin_shuffle(x, (i16){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
}

/* The largest of all lanes, in each. */
INLINE v16 largest_lane(v16 x) {
    x = larger(x, swap_halves(x));
    x = larger(x, swap_quarters(x));
    x = larger(x, swap_pairs(x));
    return larger(x, swap_lanes(x));
}

/* The sum of all lanes, in each, by one tree. */
INLINE v16 sum_of_lanes(v16 x) {
    x += swap_halves(x);
    x += swap_quarters(x);
    x += swap_pairs(x);
    return x + swap_lanes(x);
}

/* Turn sixteen rows of sixteen numbers into columns. */
INLINE void transpose16(v16 x[16]) {
    v16 y[16];
    i16 lower = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        y[i] = __builtin_shuffle(x[i], x[i + 1], lower);
        y[i + 1] = __builtin_shuffle(x[i], x[i + 1], lower + 2);
    }
    i16 low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    UNROLL
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = __builtin_shuffle(y[i + j], y[i + j + 2], low);
            x[i + 2 * j + 1] = __builtin_shuffle(y[i + j], y[i + j + 2], low + 2);
        }
    i16 even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    UNROLL
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            y[j + i] = __builtin_shuffle(x[j + i], x[j + i + 4], even);
            y[j + i + 4] = __builtin_shuffle(x[j + i], x[j + i + 4], even + 4);
        }
    UNROLL
    for (int i = 0; i < 8; i++) {
        x[i] = __builtin_shuffle(y[i], y[i + 8], even);
        x[i + 8] = __builtin_shuffle(y[i], y[i + 8], even + 4);
    }
}

/* Ask for the memory of a row that is read soon. */
INLINE void expect(const char *row, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

INLINE void transpose_steps(const char *const *rows, const char *const *ahead, long offset,
                            long width, float *keys) {
    for (int first = 0; first < TILE; first += LANES) {
        v16 x[LANES];
        UNROLL
        for (int i = 0; i < LANES; i++) {
            x[i] = (v16){0};
            memcpy(&x[i], rows[first + i] + offset, (size_t)width * 4);
        }
        for (int i = 0; ahead && i < LANES; i++) expect(ahead[first + i] + offset, width * 4);
        transpose16(x);
        UNROLL
        for (int i = 0; i < width; i++) store(keys + i * TILE + first, x[i]);
    }
}

/* Lay out keys as [steps][TILE], a step being four bytes of each; ask for those after them. */
static __attribute__((noinline)) void transpose_keys(const char *const *rows,
                                                     const char *const *ahead, long steps,
                                                     float *keys) {
    for (long step = 0; step < steps; step += LANES, keys += LANES * TILE) {
        if (steps - step >= LANES) transpose_steps(rows, ahead, 4 * step, LANES, keys);
        else transpose_steps(rows, ahead, 4 * step, LANES / 2, keys);
    }
}

/* total + a · b, of numbers or of pairs in bfloat16. */
INLINE v16 add_step(Dtype dtype, v16 total, v16 a, v16 b) {
    return dtype == FLOAT32 ? fma16(a, b, total) : dot_pairs(total, a, b);
}

/* scores [rows][TILE] of queries against a laid-out tile. */
INLINE void score(int rows, Dtype dtype, const char *q, long q_bytes, const float *keys,
                  float *scores) {
    for (int first = 0; first < TILE; first += COLUMNS * LANES) {
        v16 sums[MAX_ROWS][COLUMNS];
        UNROLL
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < COLUMNS; j++) sums[i][j] = (v16){0};
        for (long step = 0; step < q_bytes / 4; step++) {
            v16 key[COLUMNS];
            UNROLL
            for (int j = 0; j < COLUMNS; j++) key[j] = load(keys + step * TILE + first + j * LANES);
            UNROLL
            for (int i = 0; i < rows; i++) {
                v16 x = splat(q + i * q_bytes + 4 * step);
                for (int j = 0; j < COLUMNS; j++)
                    sums[i][j] = add_step(dtype, sums[i][j], x, key[j]);
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < COLUMNS; j++)
                store(scores + i * TILE + first + j * LANES, sums[i][j]);
    }
}

/* What is known of a row besides its sums: the largest score, and the sum of weights against it. */
typedef struct {
    float top[LANES], mass[LANES]; /* of a few rows */
} Marks;

/* Keep weights as the values are multiplied with them; returns them as they are kept. */
INLINE v16 keep_weights(Dtype dtype, float *row, int j, v16 weights) {
    if (dtype == FLOAT32) {
        store(row + j * LANES, weights);
        return weights;
    }
#if defined(__AVX512BF16__)
    half16 kept = (half16)_mm512_cvtneps_pbh((__m512)weights);
#else
    half16 kept = narrow(weights);
#endif
    memcpy((char *)row + j * sizeof kept, &kept, sizeof kept);
    return widen(kept);
}

/* Turn the scores of rows into weights against the largest of the tile.

   seen  keys of the tile that each row sees */
INLINE void weigh(Dtype dtype, int rows, float *scores, float scale, const int *seen,
                  Marks *marks) {
    for (int i = 0; i < rows; i++, scores += TILE) {
        v16 s[TILE / LANES];
        UNROLL
        for (int j = 0; j < TILE / LANES; j++) s[j] = load(scores + j * LANES) * all(scale);
        if (seen[i] < TILE) {
            i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            UNROLL
            for (int j = 0; j < TILE / LANES; j++)
                s[j] = choose(lane < seen[i] - j * LANES, s[j], all(LOWEST));
        }
        v16 top = largest_lane(larger(larger(s[0], s[1]), larger(s[2], s[3])));
        UNROLL
        for (int j = 0; j < TILE / LANES; j++)
            s[j] = keep_weights(dtype, scores, j, exp2_16(s[j] - top));
        marks->top[i] = top[0];
        marks->mass[i] = sum_of_lanes((s[0] + s[1]) + (s[2] + s[3]))[0];
    }
}

static __attribute__((noinline)) void weigh_float32(int rows, float *scores, float scale,
                                                    const int *seen, Marks *marks) {
    weigh(FLOAT32, rows, scores, scale, seen, marks);
}

static __attribute__((noinline)) void weigh_bfloat16(int rows, float *scores, float scale,
                                                     const int *seen, Marks *marks) {
    weigh(BFLOAT16, rows, scores, scale, seen, marks);
}

/* How a tile joins those before it: sums become sums · shrink + the tile's · weight. */
typedef struct {
    v16 shrink, weight;
} Joint;

/* Count a tile of some rows in; their top and mass become those of all so far. */
INLINE Joint join(v16 *top, v16 *mass, v16 tile_top, v16 tile_mass) {
    v16 peak = larger(*top, tile_top);
    Joint by = {exp2_16(*top - peak), exp2_16(tile_top - peak)};
    *top = peak;
    *mass = *mass * by.shrink + tile_mass * by.weight;
    return by;
}

INLINE v16 join_sums(v16 sums, v16 tile_sums, v16 shrink, v16 weight) {
    return fma16(tile_sums, weight, sums * shrink);
}

/* Sixteen values of a pair of keys in bfloat16, side by side. */
INLINE v16 pair_values(const char *const *values, long pair, long column) {
    half16 one, other;
    memcpy(&one, values[2 * pair] + 2 * column, sizeof one);
    memcpy(&other, values[2 * pair + 1] + 2 * column, sizeof other);
    return (v16)(__builtin_convertvector(one, u16) | __builtin_convertvector(other, u16) << 16);
}

/* The values of the first `seen` keys of a tile by their weights, for some rows and columns.

   values rows of keys, or of pairs of keys in bfloat16
   ahead  values of the next tile to ask for, or NULL
   by     how the tile joins the sums in `to`; NULL to write its own there */
INLINE void add_columns(int rows, int columns, Dtype dtype, const float *weights,
                        const char *const *values, const char *const *ahead, long column, int seen,
                        const Joint *by, float *const *to) {
    v16 total[MAX_ROWS][COLUMNS];
    UNROLL
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) total[i][j] = (v16){0};
    int keys = dtype == FLOAT32 ? 1 : 2; /* of a step */
    for (int step = 0; step < seen / keys; step++) {
        v16 v[COLUMNS];
        UNROLL
        for (int j = 0; j < columns; j++)
            v[j] = load((const float *)values[step] + column + j * LANES);
        for (int key = 0; ahead && key < keys; key++)
            expect(ahead[keys * step + key] + column * size_of(dtype),
                   columns * LANES * size_of(dtype));
        UNROLL
        for (int i = 0; i < rows; i++) {
            v16 w = splat(weights + i * TILE + step);
            for (int j = 0; j < columns; j++) total[i][j] = add_step(dtype, total[i][j], w, v[j]);
        }
    }
    if (seen % keys) {
        int step = seen / keys;
        UNROLL
        for (int j = 0; j < columns; j++) {
            v16 v = load((const float *)values[step] + column + j * LANES);
            v = (v16)((u16)v & 0xffff); /* the second of the pair is not seen */
            for (int i = 0; i < rows; i++)
                total[i][j] = add_step(dtype, total[i][j], splat(weights + i * TILE + step), v);
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float *at = to[i] + column + j * LANES;
            if (by)
                total[i][j] = join_sums(load(at), total[i][j], all(by->shrink[i]),
                                        all(by->weight[i]));
            store(at, total[i][j]);
        }
}

INLINE void add_values(int rows, Dtype dtype, const float *weights,
                       const char *const *values, const char *const *ahead, int seen,
                       const Joint *by, float *const *to, long dim) {
    long column = 0;
    for (; column + COLUMNS * LANES <= dim; column += COLUMNS * LANES)
        add_columns(rows, COLUMNS, dtype, weights, values, ahead, column, seen, by, to);
    for (; column < dim; column += LANES)
        add_columns(rows, 1, dtype, weights, values, ahead, column, seen, by, to);
}
