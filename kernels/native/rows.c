/* What works on each row alone: norm, gated SiLU, rotary positions with the store of K and V.

   Owns: the arithmetic of a row, in one order.  Does not know: how rows were computed.
   Idea: one pass over memory each, where tensor operations would take six to ten. */

#include <math.h>

#include "kernels.h"
#include "team.h"

#define ROWS 2 /* of an item */

static long items_of(long rows) { return (rows + ROWS - 1) / ROWS; }

static long end_of(long item, long rows) {
    long end = (item + 1) * ROWS;
    return end < rows ? end : rows;
}

/* Threads are worth waking from 32k numbers on. */
static int threads_for(long rows, long width, long threads) {
    return rows * width < 32768 ? 1 : (int)threads;
}

#define CHAINS (32 / LANES) /* number i of a row goes to chain i % 32, on every target */

/* out = x / rms(x) · weight; with a residual, x is first added to it and the sum is what counts. */
INLINE void norm_row(Dtype dtype, const char *x, char *residual, const char *weight, char *out,
                     long width, float eps) {
    long size = size_of(dtype);
    vec total[CHAINS] = {0};
    for (long first = 0; first < width; first += CHAINS * LANES) {
        UNROLL
        for (int j = 0; j < CHAINS; j++) {
            long i = first + j * LANES;
            if (i >= width) break;
            vec value = load_some(dtype, x + i * size, width - i);
            if (residual) {
                value = rounded(dtype, value + load_some(dtype, residual + i * size, width - i));
                store_some(dtype, residual + i * size, value, width - i);
            }
            total[j] = fma_vec(value, value, total[j]);
        }
    }
    float scale = 1.0f / sqrtf(sum_of_vectors(CHAINS, total)[0] / (float)width + eps);
    const char *from = residual ? residual : x;
    for (long i = 0; i < width; i += LANES) {
        vec value = load_some(dtype, from + i * size, width - i) * all(scale);
        vec factor = load_some(dtype, weight + i * size, width - i);
        store_some(dtype, out + i * size, rounded(dtype, value) * factor, width - i);
    }
}

long norm_items(const Norm *norm) { return items_of(norm->rows); }

void normalise(const void *what, long item, int thread) {
    (void)thread;
    const Norm *n = what;
    for (long row = item * ROWS; row < end_of(item, n->rows); row++) {
        const char *x = n->x + row * n->x_stride;
        char *sum = n->residual ? n->residual + row * n->residual_stride : NULL;
        char *out = n->out + row * n->out_stride;
        if (n->dtype == FLOAT32) norm_row(FLOAT32, x, sum, n->weight, out, n->width, n->eps);
        else norm_row(BFLOAT16, x, sum, n->weight, out, n->width, n->eps);
    }
}

void radixcache_rms_norm(const Norm *norm, long threads) {
    work_once(normalise, norm, norm_items(norm), threads_for(norm->rows, norm->width, threads));
}

INLINE void gate_row(Dtype dtype, const char *gate, char *out, long width) {
    long size = size_of(dtype);
    const char *up = gate + width * size;
    for (long i = 0; i < width; i += LANES) {
        vec x = load_some(dtype, gate + i * size, width - i);
        vec opened = rounded(dtype, x / (all(1.0f) + exp_vec(-x)));
        vec y = load_some(dtype, up + i * size, width - i);
        store_some(dtype, out + i * size, opened * y, width - i);
    }
}

long gate_items(const Gate *gate) { return items_of(gate->rows); }

void open_gates(const void *what, long item, int thread) {
    (void)thread;
    const Gate *g = what;
    for (long row = item * ROWS; row < end_of(item, g->rows); row++) {
        const char *from = g->gate_up + row * g->stride;
        if (g->dtype == FLOAT32) gate_row(FLOAT32, from, g->out + row * g->out_stride, g->width);
        else gate_row(BFLOAT16, from, g->out + row * g->out_stride, g->width);
    }
}

void radixcache_silu_and_mul(const Gate *gate, long threads) {
    work_once(open_gates, gate, gate_items(gate), threads_for(gate->rows, gate->width, threads));
}

/* Turn the pairs (i, i + D/2) of one head by the angles of its position; `to` may be `from`. */
INLINE void turn_head(Dtype dtype, const char *from, const float *cos, const float *sin, char *to,
                      long half) {
    long size = size_of(dtype);
    for (long i = 0; i < half; i += LANES) {
        long count = half - i;
        vec left = load_some(dtype, from + i * size, count);
        vec right = load_some(dtype, from + (half + i) * size, count);
        vec c = load_some(FLOAT32, cos + i, count), s = load_some(FLOAT32, sin + i, count);
        store_some(dtype, to + i * size, left * c - right * s, count);
        store_some(dtype, to + (half + i) * size, right * c + left * s, count);
    }
}

INLINE void turn_token(Dtype dtype, const Turn *t, long token) {
    long size = size_of(dtype), width = t->head_dim * size, half = t->head_dim / 2;
    const char *from = t->qkv + token * t->token_stride;
    const float *cos = t->cos + token * t->angle_stride, *sin = t->sin + token * t->angle_stride;
    char *q = t->q + token * t->q_stride;
    for (long head = 0; head < t->heads; head++, from += t->head_stride)
        turn_head(dtype, from, cos, sin, q + head * width, half);
    long slot = t->slots[token];
    if (slot < 0) return;
    long place = slot / t->block_size * t->block_stride + slot % t->block_size * t->slot_stride;
    for (long head = 0; head < t->kv_heads; head++) {
        turn_head(dtype, from, cos, sin, t->k_pool + place, half);
        memcpy(t->v_pool + place, from + t->kv_heads * t->head_stride, (size_t)width);
        from += t->head_stride;
        place += t->pool_head_stride;
    }
}

long turn_items(const Turn *turn) { return items_of(turn->tokens); }

void turn_and_store(const void *what, long item, int thread) {
    (void)thread;
    const Turn *t = what;
    for (long token = item * ROWS; token < end_of(item, t->tokens); token++) {
        if (t->dtype == FLOAT32) turn_token(FLOAT32, t, token);
        else turn_token(BFLOAT16, t, token);
    }
}

long first_wrong_slot(const Turn *turn) {
    for (long token = 0; token < turn->tokens; token++)
        if (turn->slots[token] >= turn->num_slots) return token;
    return -1;
}

/* Returns the first token whose slot is past the pool, having written nothing; else -1. */
long radixcache_rotary_store(const Turn *turn, long threads) {
    long wrong = first_wrong_slot(turn);
    if (wrong >= 0) return wrong;
    long width = (turn->heads + 2 * turn->kv_heads) * turn->head_dim;
    work_once(turn_and_store, turn, turn_items(turn), threads_for(turn->tokens, width, threads));
    return -1;
}
