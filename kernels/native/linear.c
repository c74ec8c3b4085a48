/* Rows times a packed weight.

   Owns: the order of the sums, and how a product is dealt out to threads.
   Does not know: how a weight is stored.
   Idea: every output is one chain over k = 0, 1, … in a lane of its own, so the result is
   batch-invariant: the number of rows beside it decides only how often the weight is read.  A tile
   is as many sums as the registers hold; between blocks of inputs they wait in memory.

       target     registers   tile: rows × outputs
       AVX-512    32          14 × 32
       AVX2       16           6 × 16, or 3 × 32
       NEON       32           6 × 16
       SSE2       16           6 × 8,  or 3 × 16 */

#include "kernels.h"
#include "team.h"

#if LANES == 16
#define ROWS 14
#define WIDE_ROWS 14 /* rows that meet a tile of twice as many outputs */
#define OUTPUTS 32
#elif LANES == 8
#define ROWS 6
#define WIDE_ROWS 3
#define OUTPUTS 16
#elif defined(__x86_64__)
#define ROWS 6
#define WIDE_ROWS 3
#define OUTPUTS 8
#else
#define ROWS 6
#define WIDE_ROWS 2
#define OUTPUTS 16
#endif

#define CHUNK (LANES == 16 ? 8 * ROWS : 16 * ROWS) /* rows of an item */
#define NEAR 192    /* inputs of a block where rows are many, and its weights are used often */
#define FEW 64      /* where rows are few */
#define FEW_ROWS 12
#define LONE 4096 /* of a row alone */

INLINE vec add_step(int pairs, vec total, vec x, vec w) {
    return pairs ? dot_pairs(total, x, w) : fma_vec(x, w, total);
}

/* A block of inputs: some rows, and the weights of one panel. */
typedef struct {
    const char *x;        /* [rows], a step being four bytes of each */
    const float *weights; /* [steps][PANEL] */
    float *sums;          /* [rows][PANEL] */
    long x_stride, steps;
} Strip;

/* `rows` rows times `vectors` · LANES outputs; both are known where this is inlined. */
INLINE void multiply_tile(int rows, int vectors, int pairs, const Strip *s, long first,
                          long column) {
    const char *x = s->x + first * s->x_stride;
    const float *w = s->weights + column;
    float *sums = s->sums + first * PANEL + column;
    vec total[ROWS][8];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) total[i][j] = load(sums + i * PANEL + j * LANES);
    }
    const char *at[(ROWS + 2) / 3]; /* of every third row: more addresses than these spill */
    UNROLL
    for (int i = 0; i < rows; i += 3) at[i / 3] = x + i * s->x_stride;
    for (long k = 0; k < s->steps; k++, w += PANEL) {
        long stride = s->x_stride;
        HIDE(stride); /* or the compiler adds it up for each row beforehand */
        vec weight[8];
        UNROLL
        for (int j = 0; j < vectors; j++) weight[j] = load(w + j * LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            vec value = splat(at[i / 3] + i % 3 * stride);
            UNROLL
            for (int j = 0; j < vectors; j++)
                total[i][j] = add_step(pairs, total[i][j], value, weight[j]);
        }
        UNROLL
        for (int i = 0; i < rows; i += 3) at[i / 3] += 4;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) store(sums + i * PANEL + j * LANES, total[i][j]);
    }
}

/* All outputs of the panel; fewer rows take more outputs at a time. */
INLINE void multiply_panel(int rows, int pairs, const Strip *s, long first) {
    int outputs = rows <= WIDE_ROWS && OUTPUTS < PANEL ? 2 * OUTPUTS : OUTPUTS;
    for (long column = 0; column < PANEL; column += outputs)
        multiply_tile(rows, outputs / LANES, pairs, s, first, column);
}

#define CASE(n) case n: if (n <= ROWS) multiply_panel(n <= ROWS ? n : 1, pairs, s, first); break;

INLINE void multiply_rows(int rows, int pairs, const Strip *s, long first) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

static void multiply_numbers(int rows, const Strip *s, long first) {
    multiply_rows(rows, 0, s, first);
}

#if PAIRS
static void multiply_pairs(int rows, const Strip *s, long first) {
    multiply_rows(rows, 1, s, first);
}
#else
#define multiply_pairs multiply_numbers
#endif

/* Rows as they are multiplied: where they lie, or in `room`.  bfloat16 is widened where pairs are
   not multiplied; where they are, an odd input gets a zero beside it. */
static void place_rows(const Product *p, long start, long count, long first, long inputs,
                       float *room, Strip *strip) {
    Dtype dtype = (Dtype)p->dtype;
    int pairs = PAIRS && dtype == BFLOAT16;
    strip->x = p->x + start * p->x_stride + first * size_of(dtype);
    strip->x_stride = p->x_stride;
    strip->steps = pairs ? (inputs + 1) / 2 : inputs;
    if (dtype == FLOAT32 || (pairs && inputs % 2 == 0)) return;
    long width = pairs ? inputs + 1 : 2 * inputs; /* in 16 bits */
    for (long i = 0; i < count; i++) {
        const char *from = strip->x + i * p->x_stride;
        char *to = (char *)room + i * 2 * width;
        if (pairs) {
            memset(to + 2 * inputs, 0, 2);
            memcpy(to, from, (size_t)(2 * inputs));
        } else {
            for (long k = 0; k < inputs; k += LANES) {
                vec x = load_some(BFLOAT16, from + 2 * k, inputs - k);
                store_some(FLOAT32, to + 4 * k, x, inputs - k);
            }
        }
    }
    strip->x = (const char *)room;
    strip->x_stride = 2 * width;
}

/* Write the sums of a row, or as many as there are outputs. */
static void finish(const Product *p, const float *sums, long row, long column, long count) {
    Dtype dtype = (Dtype)p->dtype;
    long size = size_of(dtype);
    char *out = p->out + row * p->out_stride + column * size;
    for (long i = 0; i < PANEL && i < count; i += LANES) {
        vec total = load(sums + i);
        if (p->bias) total += load_some(dtype, p->bias + (column + i) * size, count - i);
        store_some(dtype, out + i * size, total, count - i);
    }
}

/* How rows of a chunk become tiles; measured, see kernels/calibration.py.  It changes no bit. */
static long tiles_are_alike = LANES == 16; /* else all but the last are full */

long radixcache_choose_tiling(long alike) { return tiles_are_alike = alike; }

long product_items(const Product *p) {
    return (p->rows + CHUNK - 1) / CHUNK * panels_of(p->matrix);
}

/* Whether a row alone is multiplied without the way through expanded weights. */
static int is_lone(const Product *p, const Part *part, long rows) {
    if (rows > 1 || part->format == F32) return 0;
    return p->dtype == FLOAT32 || (part->format == BF16 && !PAIRS);
}

/* How an item goes through its inputs: so many at a time. */
static long block_of(long rows, int lone) { return lone ? LONE : rows <= FEW_ROWS ? FEW : NEAR; }

/* A chunk of rows times a strip, tile by tile. */
static void multiply_strip(Dtype dtype, const Strip *strip, long count) {
    long tiles = (count + ROWS - 1) / ROWS, alike = tiles_are_alike;
    for (long tile = 0; tile < tiles; tile++) {
        long from = alike ? count * tile / tiles : ROWS * tile;
        long end = alike ? count * (tile + 1) / tiles : from + ROWS;
        int rows = (int)((end < count ? end : count) - from);
        (dtype == FLOAT32 ? multiply_numbers : multiply_pairs)(rows, strip, from);
    }
}

/* An item is one panel, times a chunk of rows. */
void multiply(const void *what, long item, int thread) {
    (void)thread;
    _Alignas(64) float sums[CHUNK * PANEL], weights[NEAR * PANEL], room[CHUNK * NEAR];
    _Static_assert(sizeof sums + sizeof weights + sizeof room < STACK_ROOM, "too large");
    _Static_assert(LONE <= CHUNK * NEAR, "a lone row is widened in the same room");
    const Product *p = what;
    Dtype dtype = (Dtype)p->dtype;
    long inputs = p->matrix->inputs, panels = panels_of(p->matrix);
    long start = item / panels * CHUNK, panel = item % panels, column;
    long count = start + CHUNK < p->rows ? CHUNK : p->rows - start;
    const Part *part = part_of_panel(p->matrix, &panel, &column);
    int rounded = p->rounded && part->format >= Q4_0, lone = is_lone(p, part, count);
    memset(sums, 0, (size_t)(count * PANEL) * sizeof *sums);
    if (rounded) multiply_rounded(p, part, panel, start, count, sums);
    for (long first = 0, block; first < inputs && !rounded; first += block) {
        block = block_of(count, lone);
        block = inputs - first < block ? inputs - first : block;
        Strip strip = {.sums = sums};
        place_rows(p, start, count, first, block, room, &strip);
        if (lone) {
            multiply_row(part, inputs, panel, first, block, (const float *)strip.x, sums);
            continue;
        }
        strip.weights = panel_weights(part, inputs, panel, first, block, dtype, weights);
        multiply_strip(dtype, &strip, count);
    }
    for (long i = 0; i < count; i++)
        finish(p, sums + i * PANEL, start + i, column, part->outputs - panel * PANEL);
}

void radixcache_linear(const Product *product, long threads) {
    if (product->rounded)
        work_once(round_rows, product, rounding_items(product), (int)threads);
    work_once(multiply, product, product_items(product), (int)threads);
}
