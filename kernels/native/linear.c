/* Rows times a packed weight.

   Owns: the order of the sums, and how a product is dealt out to threads.
   Does not know: how a weight is packed beyond its layout.
   Idea: every output is one chain over k = 0, 1, … in a register of its own, so it doesn't matter
   how many rows are beside it; only how often the weight is read follows from that.

       packed   [panels][steps][32]   a panel is 32 outputs; a step is one input, or a pair in
                                      bfloat16, always four bytes */

#include "kernels.h"
#include "team.h"

#define PANEL 32
#define MAX_ROWS 14 /* of 32 sums each: 28 registers, two for the weight, one for the input */
#define NEAR (384 * 1024) /* bytes of input rows that stay in the second-level cache */

INLINE v16 add_step(Dtype dtype, v16 total, v16 x, v16 w) {
    return dtype == FLOAT32 ? fma16(x, w, total) : dot_pairs(total, x, w);
}

/* Write sixteen sums of a row, or as many as there are outputs.  Not inlined: where the compiler
   sees what becomes of the sums, it keeps half of them in memory. */
static __attribute__((noinline)) void finish(const Product *p, v16 sums, long row, long column) {
    Dtype dtype = (Dtype)p->dtype;
    long size = size_of(dtype), count = p->outputs - column;
    if (count <= 0) return;
    if (p->bias) sums += load_some(dtype, p->bias + column * size, count);
    store_some(dtype, p->out + row * p->out_stride + column * size, sums, count);
}

/* `rows` rows times one panel; `rows` and `dtype` are known where this is inlined. */
INLINE void multiply_tile(int rows, Dtype dtype, const Product *p, long first, long panel) {
    long steps = (p->inputs * size_of(dtype)) / 4, odd = dtype == BFLOAT16 && p->inputs % 2;
    const float *w = (const float *)p->packed + panel * (steps + odd) * PANEL;
    const char *x = p->x + first * p->x_stride;
    v16 low[MAX_ROWS], high[MAX_ROWS];
    UNROLL
    for (int i = 0; i < rows; i++) low[i] = high[i] = (v16){0};
    const char *at[(MAX_ROWS + 2) / 3]; /* of every third row: more addresses than these spill */
    UNROLL
    for (int i = 0; i < rows; i += 3) at[i / 3] = x + i * p->x_stride;
    for (long k = 0; k < steps; k++, w += PANEL) {
        v16 w0 = load(w), w1 = load(w + LANES);
        long stride = p->x_stride;
        HIDE(stride); /* or the compiler adds it up for each row beforehand */
        UNROLL
        for (int i = 0; i < rows; i++) {
            v16 value = splat(at[i / 3] + i % 3 * stride);
            low[i] = add_step(dtype, low[i], value, w0);
            high[i] = add_step(dtype, high[i], value, w1);
        }
        UNROLL
        for (int i = 0; i < rows; i += 3) at[i / 3] += 4;
    }
    if (odd) {
        v16 w0 = load(w), w1 = load(w + LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            uint32_t last = 0;
            memcpy(&last, x + i * p->x_stride + 4 * steps, 2);
            low[i] = add_step(dtype, low[i], splat(&last), w0);
            high[i] = add_step(dtype, high[i], splat(&last), w1);
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        finish(p, low[i], first + i, panel * PANEL);
        finish(p, high[i], first + i, panel * PANEL + LANES);
    }
}

#define CASE(n) case n: multiply_tile(n, dtype, p, first, panel); break;

INLINE void multiply_rows(int rows, Dtype dtype, const Product *p, long first, long panel) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

static void multiply_float32(int rows, const Product *p, long first, long panel) {
    multiply_rows(rows, FLOAT32, p, first, panel);
}

static void multiply_bfloat16(int rows, const Product *p, long first, long panel) {
    multiply_rows(rows, BFLOAT16, p, first, panel);
}

/* Rows that are multiplied with one panel after another before the next rows come. */
static long chunk_of(const Product *p) {
    long near = NEAR / (p->inputs * size_of(p->dtype) + 1) / MAX_ROWS * MAX_ROWS;
    return near < MAX_ROWS ? MAX_ROWS : near;
}

static long panels_of(const Product *p) { return (p->outputs + PANEL - 1) / PANEL; }

long product_items(const Product *p) {
    long chunk = chunk_of(p);
    return (p->rows + chunk - 1) / chunk * panels_of(p);
}

/* An item is one panel, times a chunk of rows. */
void multiply(const void *what, long item, int thread) {
    (void)thread;
    const Product *p = what;
    long chunk = chunk_of(p), panels = panels_of(p), start = item / panels * chunk;
    long count = start + chunk < p->rows ? chunk : p->rows - start;
    long tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
    for (long tile = 0; tile < tiles; tile++) {
        long first = start + count * tile / tiles, end = start + count * (tile + 1) / tiles;
        (p->dtype == FLOAT32 ? multiply_float32 : multiply_bfloat16)((int)(end - first), p, first,
                                                                     item % panels);
    }
}

void radixcache_linear(const Product *product, long threads) {
    work_once(multiply, product, product_items(product), (int)threads);
}

/* Whether a pair of bfloat16 is multiplied and added in one instruction here. */
long radixcache_multiplies_pairs(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}
