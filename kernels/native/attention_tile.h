/* One tile of keys against a few rows of queries.

   Owns: the arithmetic of attention: the order of every sum, and what hides a key.
   Does not know: sequences, blocks, or who computes what.
   Idea: a score is one chain over the numbers of a head, an output one chain over the keys, each in
   a lane of its own.  How many rows and columns go side by side is a matter of registers alone. */

#pragma once

#include "vector.h"

#define TILE 64 /* keys that share a largest score; part of the arithmetic */
#define MAX_ROWS 6
#if LANES == 8 || (LANES == 4 && defined(__x86_64__))
#define COLUMNS(rows) ((rows) <= 3 ? 4 : 2) /* vectors of sums of each row: 12 registers of 16 */
#else
#define COLUMNS(rows) 4 /* 24 of 32 */
#endif
#define MAX_DIM 256
#define LOWEST (-__builtin_inff())
#define MARKS (LANES < 8 ? 8 : LANES) /* at least MAX_ROWS, in whole vectors */

/* How numbers of a pool are multiplied: without the instruction for pairs, bfloat16 is widened
   where a tile is laid out, and one chain of the same steps adds it up. */
#define INNER(dtype) (PAIRS ? (dtype) : FLOAT32)

/* 2 to the power of x, for x of at most 0: 1 of 0, and 0 below -126.5; a NaN stays one.
   Source: a polynomial of degree 6, fitted to the relative error: 2e-9 before rounding. */
INLINE vec exp2_vec(vec x) {
    x = larger(all(-127.0f), x);
    vec shift = all(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    vec n = x + shift;
    vec power = (vec)(((ivec)n << 23) + (127 << 23)); /* 0 of -127 */
    vec r = x - (n - shift);
    vec p = all(1.5353362e-4f);
    p = fma_vec(p, r, all(1.33988739e-3f));
    p = fma_vec(p, r, all(9.61843692e-3f));
    p = fma_vec(p, r, all(5.55033237e-2f));
    p = fma_vec(p, r, all(2.40226477e-1f));
    p = fma_vec(p, r, all(6.93147182e-1f));
    p = fma_vec(p, r, all(1.0f));
    return p * power;
}

/* Exchange blocks of `size` lanes, off the diagonal, of rows that are `size` apart. */
INLINE void exchange_blocks(vec *x, int size) {
    ivec lane = lane_numbers(), other = (lane & size) != 0;
    ivec low = (other & (lane - size + LANES)) | (~other & lane);
    ivec high = (other & (lane + LANES)) | (~other & (lane + size));
    UNROLL
    for (int i = 0; i < LANES; i++) {
        if (i & size) continue;
        vec a = x[i], b = x[i + size];
        x[i] = __builtin_shuffle(a, b, low);
        x[i + size] = __builtin_shuffle(a, b, high);
    }
}

/* Turn rows, as many as there are lanes, into columns. */
INLINE void transpose(vec *x) {
    exchange_blocks(x, 1);
    exchange_blocks(x, 2);
    if (LANES > 4) exchange_blocks(x, 4);
    if (LANES > 8) exchange_blocks(x, 8);
}

/* Ask for the memory of a row that is read soon. */
INLINE void expect(const char *row, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* Lay out `width` words of each key, a word being four bytes, from `offset` on. */
INLINE void transpose_words(Dtype dtype, const char *const *rows, const char *const *ahead,
                            long offset, long width, float *keys) {
    for (int first = 0; first < TILE; first += LANES) {
        vec x[LANES];
        UNROLL
        for (int i = 0; i < LANES; i++) {
            x[i] = (vec){0};
            memcpy(&x[i], rows[first + i] + offset, (size_t)width * 4);
        }
        for (int i = 0; ahead && i < LANES; i++) expect(ahead[first + i] + offset, width * 4);
        transpose(x);
        UNROLL
        for (int i = 0; i < width; i++) {
            float *to = keys + first;
            if (INNER(dtype) == dtype) {
                store(to + i * TILE, x[i]);
            } else {
                store(to + 2 * i * TILE, (vec)((uvec)x[i] << 16));
                store(to + (2 * i + 1) * TILE, (vec)((uvec)x[i] & 0xffff0000u));
            }
        }
    }
}

/* Lay out keys as [steps][TILE], a step being what is multiplied at once; ask for those after. */
INLINE void transpose_keys(Dtype dtype, const char *const *rows, const char *const *ahead,
                           long words, float *keys) {
    int steps = INNER(dtype) == dtype ? 1 : 2; /* of a word */
    for (long word = 0; word < words; word += LANES, keys += steps * LANES * TILE) {
        if (words - word >= LANES) transpose_words(dtype, rows, ahead, 4 * word, LANES, keys);
        else transpose_words(dtype, rows, ahead, 4 * word, LANES / 2, keys);
    }
}

/* total + a · b, of numbers or of pairs in bfloat16. */
INLINE vec add_step(Dtype inner, vec total, vec a, vec b) {
    return inner == FLOAT32 ? fma_vec(a, b, total) : dot_pairs(total, a, b);
}

/* scores [rows][TILE] of queries against a laid-out tile. */
INLINE void score(int rows, Dtype inner, const char *q, long q_bytes, const float *keys,
                  float *scores) {
    const int columns = COLUMNS(rows);
    for (int first = 0; first < TILE; first += columns * LANES) {
        vec sums[MAX_ROWS][4];
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < columns; j++) sums[i][j] = (vec){0};
        }
        for (long step = 0; step < q_bytes / 4; step++) {
            vec key[4];
            UNROLL
            for (int j = 0; j < columns; j++) key[j] = load(keys + step * TILE + first + j * LANES);
            UNROLL
            for (int i = 0; i < rows; i++) {
                vec x = splat(q + i * q_bytes + 4 * step);
                UNROLL
                for (int j = 0; j < columns; j++)
                    sums[i][j] = add_step(inner, sums[i][j], x, key[j]);
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < columns; j++)
                store(scores + i * TILE + first + j * LANES, sums[i][j]);
        }
    }
}

/* What is known of a few rows besides their sums: the largest score of each, and the sum of weights
   against it. */
typedef struct {
    float top[MARKS], mass[MARKS];
} Marks;

/* Keep weights as the values are multiplied with them; returns them as they are kept. */
INLINE vec keep_weights(Dtype dtype, float *row, int j, vec weights) {
    if (INNER(dtype) == FLOAT32) {
        weights = rounded(dtype, weights);
        store(row + j * LANES, weights);
        return weights;
    }
    halves kept = narrow(weights);
    memcpy((char *)row + j * sizeof kept, &kept, sizeof kept);
    return widen(kept);
}

/* Turn the scores of rows into weights against the largest of the tile.

   seen  keys of the tile that each row sees */
INLINE void weigh(Dtype dtype, int rows, float *scores, float scale, const int *seen,
                  Marks *marks) {
    for (int i = 0; i < rows; i++, scores += TILE) {
        vec s[TILE / LANES], top = all(LOWEST);
        UNROLL
        for (int j = 0; j < TILE / LANES; j++) s[j] = load(scores + j * LANES) * all(scale);
        if (seen[i] < TILE) {
            UNROLL
            for (int j = 0; j < TILE / LANES; j++)
                s[j] = choose(lane_numbers() < seen[i] - j * LANES, s[j], all(LOWEST));
        }
        UNROLL
        for (int j = 0; j < TILE / LANES; j++) top = larger(s[j], top);
        top = largest_lane(top);
        UNROLL
        for (int j = 0; j < TILE / LANES; j++)
            s[j] = keep_weights(dtype, scores, j, exp2_vec(s[j] - top));
        marks->top[i] = top[0];
        marks->mass[i] = sum_of_vectors(TILE / LANES, s)[0];
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

/* How a tile joins those before it, row by row: sums become sums · shrink + the tile's · weight. */
typedef struct {
    float shrink[MARKS], weight[MARKS];
} Joint;

/* Count a tile of some rows in; `so_far` becomes that of all tiles so far. */
INLINE Joint join(Marks *so_far, const Marks *tile) {
    Joint by;
    UNROLL
    for (int i = 0; i < MARKS; i += LANES) {
        vec top = load(so_far->top + i), tile_top = load(tile->top + i);
        vec peak = larger(top, tile_top);
        vec shrink = exp2_vec(top - peak), weight = exp2_vec(tile_top - peak);
        store(by.shrink + i, shrink);
        store(by.weight + i, weight);
        store(so_far->top + i, peak);
        store(so_far->mass + i,
              load(so_far->mass + i) * shrink + load(tile->mass + i) * weight);
    }
    return by;
}

INLINE vec join_sums(vec sums, vec tile_sums, float shrink, float weight) {
    return fma_vec(tile_sums, all(weight), sums * all(shrink));
}

/* Values of a pair of keys in bfloat16, side by side. */
INLINE vec pair_values(const char *const *values, long pair, long column) {
    halves one, other;
    memcpy(&one, values[2 * pair] + 2 * column, sizeof one);
    memcpy(&other, values[2 * pair + 1] + 2 * column, sizeof other);
    return (vec)(__builtin_convertvector(one, uvec) | __builtin_convertvector(other, uvec) << 16);
}

/* The values of the first `seen` keys of a tile by their weights, for some rows and columns.

   values rows of keys, or of pairs of keys in bfloat16
   ahead  values of the next tile to ask for, or NULL
   by     how the tile joins the sums in `to`; NULL to write its own there */
INLINE void add_columns(int rows, int columns, Dtype dtype, const float *weights,
                        const char *const *values, const char *const *ahead, long column, int seen,
                        const Joint *by, float *const *to) {
    vec total[MAX_ROWS][4];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < columns; j++) total[i][j] = (vec){0};
    }
    int keys = INNER(dtype) == FLOAT32 ? 1 : 2; /* of a step */
    for (int step = 0; step < seen / keys; step++) {
        vec v[4];
        UNROLL
        for (int j = 0; j < columns; j++)
            v[j] = load((const float *)values[step] + column + j * LANES);
        for (int key = 0; ahead && key < keys; key++)
            expect(ahead[keys * step + key] + column * size_of(dtype),
                   columns * LANES * size_of(dtype));
        UNROLL
        for (int i = 0; i < rows; i++) {
            vec w = splat(weights + i * TILE + step);
            UNROLL
            for (int j = 0; j < columns; j++)
                total[i][j] = add_step(INNER(dtype), total[i][j], w, v[j]);
        }
    }
    if (seen % keys) {
        int step = seen / keys;
        UNROLL
        for (int j = 0; j < columns; j++) {
            vec v = load((const float *)values[step] + column + j * LANES);
            v = (vec)((uvec)v & 0xffff); /* the second of the pair is not seen */
            UNROLL
            for (int i = 0; i < rows; i++)
                total[i][j] = add_step(INNER(dtype), total[i][j],
                                       splat(weights + i * TILE + step), v);
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < columns; j++) {
            float *at = to[i] + column + j * LANES;
            if (by) total[i][j] = join_sums(load(at), total[i][j], by->shrink[i], by->weight[i]);
            store(at, total[i][j]);
        }
    }
}

INLINE void add_values(int rows, Dtype dtype, const float *weights,
                       const char *const *values, const char *const *ahead, int seen,
                       const Joint *by, float *const *to, long dim) {
    long column = 0, wide = COLUMNS(rows) * LANES;
    for (; column + wide <= dim; column += wide)
        add_columns(rows, COLUMNS(rows), dtype, weights, values, ahead, column, seen, by, to);
    for (; column < dim; column += LANES)
        add_columns(rows, 1, dtype, weights, values, ahead, column, seen, by, to);
}
