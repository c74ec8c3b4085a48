/* Whether the kernels in C compute what they should, as one program without Python.

   Owns: small inputs, their results in double, and the same rows alone.  Does not know: the target.
   Idea: a machine that can only be emulated runs no torch, but it runs this.  A result is right if
   it is near that in double, and batch-invariant if a row alone has the bits that it has among
   others, whatever the number of threads. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "kernels.h"

/* What the library exports; records.py has the records. */
typedef struct {
    const void *raw;
    void *packed;
    long format, outputs, inputs;
} Packing;

typedef struct {
    const int32_t *seq_lens, *q_start, *members, *starts, *lens, *block_table;
    long num_sequences, num_members, num_groups, table_stride, num_blocks, block_size;
    long max_rows, num_kv_heads, group, tile, room, threads;
    int32_t *skipped;
    Item *items;
    int32_t *tokens, *limits, *parts;
    long phase_ends[PHASES], num_entries, num_parts, wrong, lacking;
} Listing;

const char *radixcache_target(void);
void radixcache_linear(const Product *product, long threads);
long radixcache_panel_bytes(long format, long inputs);
void radixcache_pack(const Packing *packing, long threads);
long radixcache_rounded_bytes(long inputs);
void radixcache_rms_norm(const Norm *norm, long threads);
void radixcache_silu_and_mul(const Gate *gate, long threads);
long radixcache_rotary_store(const Turn *turn, long threads);
void radixcache_attention_list(Listing *list);
long radixcache_attention_scratch(const AttentionStep *step);
void radixcache_attention(const Attention *attention, long threads);

#define THREADS 2

static int num_checks, num_faults;

static void check(int is_right, const char *operation, Dtype dtype, const char *fault) {
    num_checks++;
    if (is_right) return;
    num_faults++;
    printf("%s in %s %s\n", operation, dtype == FLOAT32 ? "float32" : "bfloat16", fault);
}

/* Zeros; the end of the program frees them. */
static void *room(long bytes) { return calloc(1, (size_t)bytes + 64); }

/* ---- numbers ---- */

static uint32_t draw(void) { /* xorshift */
    static uint32_t state = 2463534242u;
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

static double number(Dtype dtype, const void *from, long i) {
    float x = 0;
    long size = size_of(dtype); /* a bfloat16 is the upper half */
    memcpy((char *)&x + 4 - size, (const char *)from + i * size, (size_t)size);
    return x;
}

/* Numbers from -1 to 1 that both dtypes hold. */
static char *numbers(Dtype dtype, long count) {
    char *made = room(count * size_of(dtype));
    for (long i = 0; i < count; i++) {
        float x = (float)(int)(draw() % 257) / 128 - 1;
        if (dtype == FLOAT32) memcpy(made + 4 * i, &x, 4);
        else memcpy(made + 2 * i, (char *)&x + 2, 2); /* seven bits after the first: exact */
    }
    return made;
}

static double float16(const unsigned char *from) {
    int half = from[0] | from[1] << 8, exponent = half >> 10 & 31, fraction = half & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return half >> 15 ? -size : size;
}

/* Compare with what was computed in double, by the largest number. */
static void check_values(const char *operation, Dtype dtype, const char *got, const double *wanted,
                         long count, double tolerance) {
    double most = 0, error = 0;
    for (long i = 0; i < count; i++) {
        double off = fabs(number(dtype, got, i) - wanted[i]);
        error = off <= error ? error : off; /* a NaN stays */
        most = fabs(wanted[i]) > most ? fabs(wanted[i]) : most;
    }
    check(error <= tolerance * most, operation, dtype, "is wrong");
}

static void check_same(const char *operation, Dtype dtype, const char *alone, const char *among,
                       long bytes) {
    check(!memcmp(alone, among, (size_t)bytes), operation, dtype, "depends on other rows");
}

static double tolerance_of(Dtype dtype) { return dtype == FLOAT32 ? 1e-5 : 1e-2; }

/* ---- products ---- */

#define ROWS 101 /* more than an item takes on any target */
#define OUTPUTS 70
#define PANELS ((OUTPUTS + PANEL - 1) / PANEL)

/* Check a product of rows with weights, whose values are `exact` [OUTPUTS][inputs]. */
static void check_product(const char *operation, Dtype dtype, const Matrix *matrix,
                          const double *exact, double tolerance) {
    long inputs = matrix->inputs, size = size_of(dtype), bytes = OUTPUTS * size;
    char *x = numbers(dtype, ROWS * inputs), *bias = numbers(dtype, OUTPUTS);
    char *out = room(ROWS * bytes), *alone = room(bytes);
    char *rounded = matrix->int8 ? room(ROWS * radixcache_rounded_bytes(inputs)) : NULL;
    Product product = {matrix, x, bias, out, rounded, inputs * size, bytes, ROWS, dtype};
    radixcache_linear(&product, THREADS);
    double *wanted = room(ROWS * OUTPUTS * 8);
    for (long i = 0; i < ROWS * OUTPUTS; i++) {
        long row = i / OUTPUTS * inputs, column = i % OUTPUTS * inputs;
        wanted[i] = number(dtype, bias, i % OUTPUTS);
        for (long k = 0; k < inputs; k++)
            wanted[i] += number(dtype, x, row + k) * exact[column + k];
    }
    check_values(operation, dtype, out, wanted, ROWS * OUTPUTS, tolerance);
    for (long row = 0; row < ROWS; row++) {
        Product one = product;
        one.x = x + row * inputs * size;
        one.out = alone;
        one.rows = 1;
        radixcache_linear(&one, 1);
        check_same(operation, dtype, alone, out + row * bytes, bytes);
    }
}

/* Weights of plain numbers: [inputs][PANEL], or pairs of them. */
static void check_linear(Dtype dtype) {
    const long inputs = 97;
    long size = size_of(dtype), together = 4 / size;
    long steps = (inputs + together - 1) / together, format = dtype == FLOAT32 ? F32 : BF16;
    char *weight = numbers(dtype, OUTPUTS * inputs), *packed = room(PANELS * steps * PANEL * 4);
    double *exact = room(OUTPUTS * inputs * 8);
    for (long n = 0; n < OUTPUTS; n++) {
        for (long k = 0; k < inputs; k++) {
            long step = n / PANEL * steps + k / together;
            char *to = packed + (step * PANEL + n % PANEL) * 4 + k % together * size;
            memcpy(to, weight + (n * inputs + k) * size, (size_t)size);
            exact[n * inputs + k] = number(dtype, weight, n * inputs + k);
        }
    }
    Matrix matrix = {{{packed, format, OUTPUTS}}, 1, OUTPUTS, inputs, 0};
    check(radixcache_panel_bytes(format, inputs) == steps * PANEL * 4, "a panel", dtype,
          "has another size");
    check_product("a product", dtype, &matrix, exact, tolerance_of(dtype));
}

/* Source: dequantize_row_q4_1 of ggml. */
static void read_q4_1(const unsigned char *from, double *to) {
    for (int i = 0; i < 32; i++) {
        int q = i < 16 ? from[4 + i] & 15 : from[4 + i - 16] >> 4;
        to[i] = q * float16(from) + float16(from + 2);
    }
}

/* Source: dequantize_row_q6_K of ggml. */
static void read_q6_k(const unsigned char *from, double *to) {
    for (int i = 0; i < 256; i++) {
        int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        int low = from[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter / 2) & 15;
        int high = from[128 + 32 * half + at] >> 2 * quarter & 3;
        int scale = (signed char)from[192 + 8 * half + 2 * quarter + at / 16];
        to[i] = ((low | high << 4) - 32) * scale * float16(from + 208);
    }
}

static void check_quantised(Dtype dtype, const char *operation, long format, int int8) {
    const long inputs = 512;
    long size = format == Q4_1 ? 20 : 210, block = format == Q4_1 ? 32 : 256;
    long blocks = OUTPUTS * inputs / block;
    unsigned char *raw = room(blocks * size);
    double *exact = room(OUTPUTS * inputs * 8);
    for (long i = 0; i < blocks * size; i++) raw[i] = (unsigned char)(draw() >> 9);
    for (long i = 0; i < blocks; i++) {
        unsigned char *at = raw + i * size;
        at[format == Q4_1 ? 1 : 209] = 0x28; /* about 0.03 */
        if (format == Q4_1) at[3] = 0xa8;    /* about -0.03 */
        (format == Q4_1 ? read_q4_1 : read_q6_k)(at, exact + i * block);
    }
    char *packed = room(PANELS * radixcache_panel_bytes(format, inputs));
    Packing packing = {raw, packed, format, OUTPUTS, inputs};
    radixcache_pack(&packing, THREADS);
    Matrix matrix = {{{packed, format, OUTPUTS}}, 1, OUTPUTS, inputs, int8};
    check_product(operation, dtype, &matrix, exact, int8 ? 2e-2 : tolerance_of(dtype));
}

/* ---- rows ---- */

#define WIDTH 100 /* no multiple of any number of lanes above 4 */
#define FEW 13

static void check_norm(Dtype dtype) {
    long bytes = WIDTH * size_of(dtype);
    char *x = numbers(dtype, FEW * WIDTH), *weight = numbers(dtype, WIDTH);
    char *residual = numbers(dtype, FEW * WIDTH), *kept = room(FEW * bytes);
    char *out = room(FEW * bytes), *alone = room(bytes);
    double *wanted = room(FEW * WIDTH * 8), *added = room(FEW * WIDTH * 8);
    memcpy(kept, residual, (size_t)(FEW * bytes));
    Norm norm = {x, weight, residual, out, bytes, bytes, bytes, FEW, WIDTH, dtype, 1e-5f};
    radixcache_rms_norm(&norm, THREADS);
    for (long row = 0; row < FEW; row++) {
        double squares = 0, *sum = added + row * WIDTH;
        for (long i = 0; i < WIDTH; i++) {
            sum[i] = number(dtype, x, row * WIDTH + i) + number(dtype, kept, row * WIDTH + i);
            squares += sum[i] * sum[i];
        }
        double rms = sqrt(squares / WIDTH + 1e-5);
        for (long i = 0; i < WIDTH; i++)
            wanted[row * WIDTH + i] = sum[i] / rms * number(dtype, weight, i);
        Norm one = norm;
        one.x += row * bytes, one.residual = kept + row * bytes, one.out = alone, one.rows = 1;
        radixcache_rms_norm(&one, 1);
        check_same("a norm", dtype, alone, out + row * bytes, bytes);
        check_same("a residual", dtype, one.residual, residual + row * bytes, bytes);
    }
    check_values("a norm", dtype, out, wanted, FEW * WIDTH, tolerance_of(dtype));
    check_values("a residual", dtype, residual, added, FEW * WIDTH, tolerance_of(dtype));
}

static void check_gate(Dtype dtype) {
    long bytes = WIDTH * size_of(dtype);
    char *x = numbers(dtype, FEW * 2 * WIDTH), *out = room(FEW * bytes), *alone = room(bytes);
    double *wanted = room(FEW * WIDTH * 8);
    Gate gate = {x, out, 2 * bytes, bytes, FEW, WIDTH, dtype};
    radixcache_silu_and_mul(&gate, THREADS);
    for (long row = 0; row < FEW; row++) {
        for (long i = 0; i < WIDTH; i++) {
            double opened = number(dtype, x, 2 * row * WIDTH + i);
            wanted[row * WIDTH + i] =
                opened / (1 + exp(-opened)) * number(dtype, x, (2 * row + 1) * WIDTH + i);
        }
        Gate one = {x + 2 * row * bytes, alone, 2 * bytes, bytes, 1, WIDTH, dtype};
        radixcache_silu_and_mul(&one, 1);
        check_same("a gated SiLU", dtype, alone, out + row * bytes, bytes);
    }
    check_values("a gated SiLU", dtype, out, wanted, FEW * WIDTH, tolerance_of(dtype));
}

/* ---- heads ---- */

#define HEADS 6
#define KV_HEADS 2
#define DIM 48
#define SLOTS 16 /* of a block */
#define BLOCKS 40
#define TOKEN (KV_HEADS * DIM)
#define POOL (BLOCKS * SLOTS * TOKEN)

/* Head `from` [DIM], turned. */
static void turn_exactly(Dtype dtype, const char *from, const float *cosine, const float *sine,
                         double *to) {
    for (int i = 0; i < DIM / 2; i++) {
        double left = number(dtype, from, i), right = number(dtype, from, i + DIM / 2);
        to[i] = left * cosine[i] - right * sine[i];
        to[i + DIM / 2] = right * cosine[i] + left * sine[i];
    }
}

static void check_rotary(Dtype dtype) {
    long size = size_of(dtype), width = HEADS + 2 * KV_HEADS, q_bytes = HEADS * DIM * size;
    char *qkv = numbers(dtype, FEW * width * DIM), *q = room(FEW * q_bytes), *alone = room(q_bytes);
    char *k = room(POOL * size), *alone_k = room(POOL * size);
    char *v = room(POOL * size), *alone_v = room(POOL * size);
    const float *cosine = (float *)numbers(FLOAT32, FEW * DIM / 2 + 1), *sine = cosine + 1;
    int64_t slots[FEW];
    for (int i = 0; i < FEW; i++) slots[i] = i == 5 ? -1 : i * 37 % (BLOCKS * SLOTS);
    Turn turn = {qkv, cosine, sine, k, v, q, slots, width * DIM * size, DIM * size, DIM / 2,
                 q_bytes, SLOTS, BLOCKS * SLOTS, SLOTS * TOKEN * size, TOKEN * size, DIM * size,
                 HEADS, KV_HEADS, DIM, FEW, dtype};
    check(radixcache_rotary_store(&turn, THREADS) == -1, "rotary", dtype, "refuses a slot");
    double *wanted_q = room(FEW * HEADS * DIM * 8);
    double *wanted_k = room(POOL * 8), *wanted_v = room(POOL * 8);
    for (long t = 0; t < FEW; t++) {
        const char *from = qkv + t * width * DIM * size;
        const float *c = cosine + t * DIM / 2, *s = sine + t * DIM / 2;
        for (long h = 0; h < HEADS; h++, from += DIM * size)
            turn_exactly(dtype, from, c, s, wanted_q + (t * HEADS + h) * DIM);
        for (long i = 0; i < TOKEN && slots[t] >= 0; i++)
            wanted_v[slots[t] * TOKEN + i] = number(dtype, from, TOKEN + i);
        for (long h = 0; h < KV_HEADS && slots[t] >= 0; h++, from += DIM * size)
            turn_exactly(dtype, from, c, s, wanted_k + slots[t] * TOKEN + h * DIM);
        Turn one = turn;
        one.qkv += t * one.token_stride, one.cos = c, one.sin = s, one.slots = slots + t;
        one.q = alone, one.k_pool = alone_k, one.v_pool = alone_v, one.tokens = 1;
        radixcache_rotary_store(&one, 1);
        check_same("rotary", dtype, alone, q + t * q_bytes, q_bytes);
    }
    check_same("a store of K", dtype, alone_k, k, POOL * size);
    check_same("a store of V", dtype, alone_v, v, POOL * size);
    check_values("rotary", dtype, q, wanted_q, FEW * HEADS * DIM, tolerance_of(dtype));
    check_values("a store of K", dtype, k, wanted_k, POOL, tolerance_of(dtype));
    check_values("a store of V", dtype, v, wanted_v, POOL, 0);
}

/* Plan a step and attend; q and out are dense. */
static void attend(Dtype dtype, const char *q, const char *k, const char *v, char *out,
                   Listing list, long threads) {
    long size = size_of(dtype), tokens = list.q_start[list.num_sequences], heads = HEADS;
    list.num_kv_heads = KV_HEADS, list.group = HEADS / KV_HEADS, list.tile = 64;
    list.num_blocks = BLOCKS, list.block_size = SLOTS, list.max_rows = 96, list.threads = threads;
    list.table_stride = BLOCKS, list.room = BLOCKS * SLOTS;
    list.skipped = room(4 * list.num_sequences);
    radixcache_attention_list(&list); /* counts */
    list.items = room((long)sizeof(Item) * list.phase_ends[PHASES - 1]);
    list.tokens = room(4 * list.num_entries);
    list.limits = room(4 * tokens), list.parts = room(4 * tokens);
    radixcache_attention_list(&list);
    check(list.wrong < 0 && list.lacking < 0, "a list", dtype, "is refused");
    AttentionStep step = {
        list.items, list.tokens, list.limits, list.parts, list.block_table,
        .part_sums = room(list.num_parts * heads * DIM * 4),
        .part_marks = room(list.num_parts * heads * 8),
        .table_stride = BLOCKS, .num_kv_heads = KV_HEADS, .group = list.group, .head_dim = DIM,
        .block_size = SLOTS, .max_rows = list.max_rows, .dtype = dtype};
    memcpy(step.phase_ends, list.phase_ends, sizeof step.phase_ends);
    step.scratch_bytes = radixcache_attention_scratch(&step);
    step.scratch = room(threads * step.scratch_bytes);
    long token = TOKEN * size, block = SLOTS * token, head = DIM * size;
    Attention attention = {&step, q, k, v, out, heads * head, head, heads * head, head,
                           block, token, head, block, token, head, 0.25f};
    radixcache_attention(&attention, threads);
}

/* One head of one query against the first keys of a sequence. */
static void attend_exactly(Dtype dtype, const char *q, const char *k, const char *v,
                           const int32_t *table, long head, long keys, double *to) {
    double scores[BLOCKS * SLOTS], top = -INFINITY, mass = 0;
    for (long i = 0; i < keys; i++) {
        long at = (table[i / SLOTS] * SLOTS + i % SLOTS) * TOKEN + head * DIM;
        scores[i] = 0;
        for (long d = 0; d < DIM; d++)
            scores[i] += 0.25 * number(dtype, q, d) * number(dtype, k, at + d);
        top = scores[i] > top ? scores[i] : top;
    }
    for (long i = 0; i < keys; i++) mass += exp(scores[i] - top);
    for (long i = 0; i < keys; i++) {
        long at = (table[i / SLOTS] * SLOTS + i % SLOTS) * TOKEN + head * DIM;
        for (long d = 0; d < DIM; d++)
            to[d] += exp(scores[i] - top) / mass * number(dtype, v, at + d);
    }
}

/* A sequence that decodes, a prompt, and one that goes on behind what it has. */
static void check_attention(Dtype dtype) {
    const int32_t seq_lens[] = {200, 70, 133}, q_start[] = {0, 1, 71, 76}, one_start[] = {0, 1};
    long size = size_of(dtype), bytes = HEADS * DIM * size, tokens = q_start[3];
    char *q = numbers(dtype, tokens * HEADS * DIM), *k = numbers(dtype, POOL);
    char *v = numbers(dtype, POOL), *out = room(tokens * bytes), *alone = room(bytes);
    double *wanted = room(tokens * HEADS * DIM * 8);
    int32_t table[3][BLOCKS] = {{0}};
    for (int s = 0, block = 0; s < 3; s++)
        for (int i = 0; i * SLOTS < seq_lens[s]; i++) table[s][i] = block++ * 7 % BLOCKS;
    attend(dtype, q, k, v, out, (Listing){.seq_lens = seq_lens, .q_start = q_start,
           .block_table = table[0], .num_sequences = 3}, THREADS);
    for (int s = 0; s < 3; s++) {
        for (long row = q_start[s]; row < q_start[s + 1]; row++) {
            int32_t keys = (int32_t)(seq_lens[s] - q_start[s + 1] + row + 1);
            for (long h = 0; h < HEADS; h++)
                attend_exactly(dtype, q + row * bytes + h * DIM * size, k, v, table[s],
                               h / (HEADS / KV_HEADS), keys, wanted + (row * HEADS + h) * DIM);
            attend(dtype, q + row * bytes, k, v, alone, (Listing){.seq_lens = &keys,
                   .q_start = one_start, .block_table = table[s], .num_sequences = 1}, 1);
            check_same("attention", dtype, alone, out + row * bytes, bytes);
        }
    }
    check_values("attention", dtype, out, wanted, tokens * HEADS * DIM, tolerance_of(dtype));
}

int main(void) {
    for (Dtype dtype = FLOAT32; dtype <= BFLOAT16; dtype++) {
        check_linear(dtype);
        check_quantised(dtype, "a product with Q4_1", Q4_1, 0);
        check_quantised(dtype, "a product with Q6_K", Q6_K, 0);
        check_quantised(dtype, "a product of 8 bits with Q4_1", Q4_1, 1);
        check_quantised(dtype, "a product of 8 bits with Q6_K", Q6_K, 1);
        check_norm(dtype);
        check_gate(dtype);
        check_rotary(dtype);
        check_attention(dtype);
    }
    printf("%d of %d checks failed: %s\n", num_faults, num_checks, radixcache_target());
    return num_faults != 0;
}
