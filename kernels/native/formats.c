/* How a weight is stored: in numbers, or quantised as a GGUF file has it.

   Owns: the layout of a panel in each format, and the way from a file's blocks to it and from it to
   numbers.  Does not know: products.
   Idea: a quantised number is an unsigned integer q of 4, 5, 6 or 8 bits with a scale, and one
   formula gives its value, rounded once: (q - zero) · scale, or q · scale + minimum, whose first
   product is exact.  So each number has the same bits as one that was dequantised beforehand, on
   every target. */

#include <stddef.h>

#include "formats.h"
#include "team.h"

long panel_bytes(Format format, long inputs) {
    if (format == F32) return inputs * PANEL * 4;
    if (format < Q4_0) return (inputs + 1) / 2 * PANEL * 4;
    const Shape *s = shapes + format;
    long blocks = inputs / BLOCK;
    return blocks * block_bytes(s) + (s->super ? blocks / s->super * halves_bytes(s) : 0);
}

static long panels(const Part *part) { return (part->outputs + PANEL - 1) / PANEL; }

long panels_of(const Matrix *m) {
    long count = 0;
    for (long i = 0; i < m->num_parts; i++) count += panels(m->parts + i);
    return count;
}

const Part *part_of_panel(const Matrix *m, long *panel, long *column) {
    const Part *part = m->parts;
    for (*column = 0; *panel >= panels(part); part++) {
        *panel -= panels(part);
        *column += part->outputs;
    }
    *column += *panel * PANEL;
    return part;
}

/* ---- from a panel to numbers ---- */

/* Eight inputs of some outputs: words of a block, and the word with their upper bits. */
typedef struct {
    uvec low, high, upper;
} Eight;

INLINE Eight load_eight(const Shape *s, const char *words, int eight) {
    long row = PANEL * 4;
    if (s->bits == 8)
        return (Eight){load_words(words + 2 * eight * row),
                       load_words(words + (2 * eight + 1) * row), (uvec){0}};
    uvec word = load_words(words + eight * row), upper = {0};
    if (s->bits > 4) upper = load_words(words + (s->bits == 5 ? 4 : 4 + eight / 2) * row);
    return (Eight){word, word >> 4, upper};
}

/* The value of input n of an eight. */
INLINE vec value_of(const Shape *s, const Eight *e, int eight, int n, const Scales *by) {
    uvec q = (n < 4 ? e->low : e->high) >> 8 * (n % 4) & (s->bits == 8 ? 255 : 15);
    if (s->bits == 5) q |= (e->upper >> (8 * eight + n) & 1) << 4;
    if (s->bits == 6) q |= (e->upper >> (16 * (eight % 2) + 2 * n) & 3) << 4;
    vec scale = by->scale[eight / 2];
    return s->minimum ? fma_vec(__builtin_convertvector((ivec)q, vec), scale, by->minimum)
                      : __builtin_convertvector((ivec)q - s->zero, vec) * scale;
}

/* Blocks as [inputs][PANEL] floats; the shape is known where inlined. */
INLINE void expand_blocks(const Shape *s, const char *panel, long first, long count, float *to) {
    for (long i = first; i < first + count; i++, to += BLOCK * PANEL) {
        const char *above, *block = find_block(s, panel, i, &above);
        for (long lane = 0; lane < PANEL; lane += LANES) {
            Scales by = block_scales(s, block, above, lane);
            UNROLL
            for (int eight = 0; eight < 4; eight++) {
                Eight e = load_eight(s, words_of(s, block) + 4 * lane, eight);
                UNROLL
                for (int n = 0; n < 8; n++)
                    store(to + (8 * eight + n) * PANEL + lane, value_of(s, &e, eight, n, &by));
            }
        }
    }
}

#define VECTORS (PANEL / LANES)

/* Blocks times one row, without the way through memory; the same chains. */
INLINE void dot_blocks(const Shape *s, const char *panel, long first, long count, const float *x,
                       float *sums) {
    vec total[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; v++) total[v] = load(sums + v * LANES);
    for (long i = first; i < first + count; i++, x += BLOCK) {
        const char *above, *block = find_block(s, panel, i, &above);
        Scales by[VECTORS];
        UNROLL
        for (int v = 0; v < VECTORS; v++) by[v] = block_scales(s, block, above, v * LANES);
        UNROLL
        for (int eight = 0; eight < 4; eight++) {
            UNROLL
            for (int v = 0; v < VECTORS; v += 2) { /* two fit the registers; the next overlap */
                const char *words = words_of(s, block) + 4 * v * LANES;
                Eight one = load_eight(s, words, eight);
                Eight two = load_eight(s, words + 4 * LANES, eight);
                UNROLL
                for (int n = 0; n < 8; n++) {
                    vec value = splat(x + 8 * eight + n);
                    total[v] = fma_vec(value, value_of(s, &one, eight, n, by + v), total[v]);
                    total[v + 1] =
                        fma_vec(value, value_of(s, &two, eight, n, by + v + 1), total[v + 1]);
                }
            }
        }
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++) store(sums + v * LANES, total[v]);
}

/* The two numbers of a pair. */
INLINE vec low_of(Format format, uvec word) {
    return format == BF16 ? (vec)(word << 16) : from_float16(word & 0xffff);
}

INLINE vec high_of(Format format, uvec word) {
    return format == BF16 ? (vec)(word & 0xffff0000u) : from_float16(word >> 16);
}

typedef void Expand(const char *panel, long first, long count, float *to);
typedef void Dot(const char *panel, long first, long count, const float *x, float *sums);

#define LOOPS(name) \
    static void expand_##name(const char *panel, long first, long count, float *to) { \
        const Shape shape = {SHAPE_##name}; \
        expand_blocks(&shape, panel, first, count, to); \
    } \
    static void dot_##name(const char *panel, long first, long count, const float *x, \
                           float *sums) { \
        const Shape shape = {SHAPE_##name}; \
        dot_blocks(&shape, panel, first, count, x, sums); \
    }
EACH_QUANTISED(LOOPS)

#define EXPANDS(name) [name] = expand_##name,
#define DOTS(name) [name] = dot_##name,
static Expand *const expands[NUM_FORMATS] = {EACH_QUANTISED(EXPANDS)};
static Dot *const dots[NUM_FORMATS] = {EACH_QUANTISED(DOTS)};

/* Pairs of 16-bit numbers times one row; a zero stands in place of an odd last input. */
INLINE void dot_16_bits(Format format, const char *from, long count, const float *x, float *sums) {
    vec total[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; v++) total[v] = load(sums + v * LANES);
    for (long k = 0; k < count; k += 2) {
        vec one = splat(x + k), two = k + 1 < count ? splat(x + k + 1) : (vec){0};
        UNROLL
        for (int v = 0; v < VECTORS; v++, from += 4 * LANES) {
            uvec word = load_words(from);
            total[v] = fma_vec(one, low_of(format, word), total[v]);
            total[v] = fma_vec(two, high_of(format, word), total[v]);
        }
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++) store(sums + v * LANES, total[v]);
}

void multiply_row(const Part *part, long inputs, long panel, long first, long count, const float *x,
                  float *sums) {
    const char *from = part->packed + panel * panel_bytes((Format)part->format, inputs);
    if (part->format == BF16) dot_16_bits(BF16, from + first / 2 * PANEL * 4, count, x, sums);
    else if (part->format == F16) dot_16_bits(F16, from + first / 2 * PANEL * 4, count, x, sums);
    else dots[part->format](from, first / BLOCK, count / BLOCK, x, sums);
}

/* Pairs of 16-bit numbers as two rows of floats. */
static void expand_pairs(Format format, const char *panel, long first, long pairs, float *to) {
    const char *from = panel + first / 2 * PANEL * 4;
    for (long i = 0; i < pairs * PANEL; i += LANES, from += 4 * LANES) {
        uvec word = load_words(from);
        float *at = to + i / PANEL * 2 * PANEL + i % PANEL;
        store(at, low_of(format, word));
        store(at + PANEL, high_of(format, word));
    }
}

/* Round to bfloat16: in place, or to pairs of rows where those are multiplied. */
static void round_weights(float *weights, long count) {
    for (long k = 0; k < count; k += PAIRS ? 2 : 1) {
        for (long i = 0; i < PANEL; i += LANES) {
            float *at = weights + k * PANEL + i;
            if (PAIRS) {
                uvec low = __builtin_convertvector(narrow(load(at)), uvec);
                uvec high = __builtin_convertvector(narrow(load(at + PANEL)), uvec);
                store(weights + k / 2 * PANEL + i, (vec)(low | high << 16));
            } else {
                store(at, rounded(BFLOAT16, load(at)));
            }
        }
    }
}

const float *panel_weights(const Part *part, long inputs, long panel, long first, long count,
                           Dtype dtype, float *room) {
    Format format = (Format)part->format;
    const char *from = part->packed + panel * panel_bytes(format, inputs);
    if (format == F32) return (const float *)from + first * PANEL;
    if (format == BF16 && PAIRS && dtype == BFLOAT16)
        return (const float *)from + first / 2 * PANEL;
    if (format < Q4_0) expand_pairs(format, from, first, (count + 1) / 2, room);
    else expands[format](from, first / BLOCK, count / BLOCK, room);
    if (dtype == BFLOAT16 && format != BF16) round_weights(room, count);
    return room;
}

/* ---- from a file's blocks to panels ---- */

/* Rows of a file, all of one format. */
typedef struct {
    const unsigned char *raw; /* [outputs][blocks] as a GGUF has them */
    char *packed;
    long format, outputs, inputs;
} Packing;

/* A block of one output, taken apart. */
typedef struct {
    unsigned char q[BLOCK], scales[2], minimum; /* factors, in super-blocks */
    uint16_t halves[2];
} Block;

static uint16_t half_at(const unsigned char *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* The 6-bit factors of block j of a super-block in Q4_K and Q5_K. */
static void read_factors(const unsigned char *from, long j, Block *b) {
    b->scales[0] = j < 4 ? from[j] & 63 : (from[j + 4] & 15) | (from[j - 4] >> 6) << 4;
    b->minimum = j < 4 ? from[j + 4] & 63 : (from[j + 4] >> 4) | (from[j] >> 6) << 4;
}

static void read_simple(const Shape *s, const unsigned char *from, Block *b) {
    const unsigned char *high = from + 2 * (1 + s->minimum), *low = high + (s->bits == 5 ? 4 : 0);
    for (int i = 0; i < BLOCK; i++) {
        if (s->bits == 8) b->q[i] = low[i] ^ 128; /* signed: zero becomes 128 */
        else b->q[i] = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
        if (s->bits == 5) b->q[i] |= (high[i / 8] >> i % 8 & 1) << 4;
    }
    for (int i = 0; i <= s->minimum; i++) b->halves[i] = half_at(from + 2 * i);
}

static void read_super(const Shape *s, const unsigned char *from, long j, Block *b) {
    if (s->bits == 6) {
        const unsigned char *low = from + j / 4 * 64 + j % 2 * 32, *high = from + 128 + j / 4 * 32;
        for (int i = 0; i < BLOCK; i++)
            b->q[i] = (unsigned char)((low[i] >> (j % 4 < 2 ? 0 : 4) & 15) |
                                      (high[i] >> 2 * (j % 4) & 3) << 4);
        memcpy(b->scales, from + 192 + 2 * j, 2);
        b->halves[0] = half_at(from + 208);
        return;
    }
    const unsigned char *high = from + 16, *low = from + (s->bits == 5 ? 48 : 16) + j / 2 * 32;
    for (int i = 0; i < BLOCK; i++) {
        b->q[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
        if (s->bits == 5) b->q[i] |= (high[i] >> j & 1) << 4;
    }
    read_factors(from + 4, j, b);
    for (int i = 0; i < 2; i++) b->halves[i] = half_at(from + 2 * i);
}

/* Words of four bytes are written by value, as the kernels read them. */
static void write_words(const Shape *s, const Block *b, uint32_t *to) {
    uint32_t words[8] = {0};
    for (int i = 0; i < BLOCK; i++) {
        uint32_t q = b->q[i];
        if (s->bits == 8) {
            words[i / 4] |= q << 8 * (i % 4);
            continue;
        }
        words[i / 8] |= (q & 15) << (8 * (i % 4) + i % 8 / 4 * 4);
        if (s->bits == 5) words[4] |= (q >> 4) << i;
        if (s->bits == 6) words[4 + i / 16] |= (q >> 4) << 2 * (i % 16);
    }
    for (int w = 0; w < s->bits; w++) to[w * PANEL] = words[w];
}

static void write_block(const Shape *s, const Block *b, char *at, char *above, long lane) {
    char *halves_to = s->super ? above : at;
    for (int i = 0; i <= s->minimum; i++)
        memcpy(halves_to + 2 * (i * PANEL + lane), b->halves + i, 2);
    if (s->super) {
        for (int i = 0; i < s->scales; i++) at[i * PANEL + lane] = (char)b->scales[i];
        if (s->minimum) at[PANEL + lane] = (char)b->minimum;
    }
    char *words = at + block_bytes(s) - s->bits * PANEL * 4;
    write_words(s, b, (uint32_t *)words + lane);
}

/* An item is one panel; outputs beyond the last are zeros. */
static void pack_panel(const void *what, long panel, int thread) {
    (void)thread;
    const Packing *p = what;
    const Shape *s = shapes + p->format;
    long per_file_block = s->super ? s->super : 1, blocks = p->inputs / BLOCK;
    long row_bytes = blocks / per_file_block * s->file_bytes;
    long size = panel_bytes((Format)p->format, p->inputs);
    char *to = p->packed + panel * size;
    memset(to, 0, (size_t)size);
    for (long lane = 0; lane < PANEL && panel * PANEL + lane < p->outputs; lane++) {
        const unsigned char *row = p->raw + (panel * PANEL + lane) * row_bytes;
        for (long block = 0; block < blocks; block++) {
            const unsigned char *from = row + block / per_file_block * s->file_bytes;
            char *at = to + block_at(s, block), *above = NULL;
            Block b = {0};
            if (s->super) {
                read_super(s, from, block % s->super, &b);
                above = to + block_at(s, block - block % s->super) - halves_bytes(s);
            } else {
                read_simple(s, from, &b);
            }
            write_block(s, &b, at, above, lane);
        }
    }
}

long radixcache_panel_bytes(long format, long inputs) {
    return panel_bytes((Format)format, inputs);
}

void radixcache_pack(const Packing *packing, long threads) {
    work_once(pack_panel, packing, (packing->outputs + PANEL - 1) / PANEL, (int)threads);
}

/* ---- rows of a matrix, as numbers ---- */

#define ROWS_BLOCK 256 /* inputs that are expanded at once */

typedef struct {
    const Matrix *matrix;
    const int64_t *ids; /* within the matrix */
    char *out;          /* [count][inputs], dense */
    long count, dtype;
} Taking;

static void store_number(Dtype dtype, char *out, long at, float x) {
    if (dtype == FLOAT32) memcpy(out + 4 * at, &x, 4);
    else store_some(BFLOAT16, out + 2 * at, all(x), 1);
}

/* Ids that follow one another in one panel share the work. */
void radixcache_take_rows(const Taking *t) {
    const Matrix *m = t->matrix;
    float room[ROWS_BLOCK * PANEL];
    for (long start = 0, end; start < t->count; start = end) {
        long whole = 0, column, panel;
        const Part *part = m->parts;
        for (; t->ids[start] >= whole + part->outputs; part++) whole += part->outputs;
        panel = (t->ids[start] - whole) / PANEL;
        column = whole + panel * PANEL;
        long next = column + PANEL < whole + part->outputs ? column + PANEL : whole + part->outputs;
        for (end = start; end < t->count && t->ids[end] >= column && t->ids[end] < next;) end++;
        for (long first = 0; first < m->inputs; first += ROWS_BLOCK) {
            long count = m->inputs - first < ROWS_BLOCK ? m->inputs - first : ROWS_BLOCK;
            const float *w = panel_weights(part, m->inputs, panel, first, count, FLOAT32, room);
            for (long i = start; i < end; i++)
                for (long k = 0; k < count; k++)
                    store_number((Dtype)t->dtype, t->out, i * m->inputs + first + k,
                                 w[k * PANEL + t->ids[i] - column]);
        }
    }
}
