/* What works on each row alone: norm, gated SiLU, rotary positions with the store of K and V.

   Owns: the arithmetic of a row, in one order.  Does not know: how rows were computed.
   Idea: one pass over memory each, where tensor operations would take six to ten. */

#include <math.h>

#include "vector.h"

#define WORTH_THREADS 32768 /* numbers; below, waking a thread costs more than it saves */

/* out = x / rms(x) · weight; with a residual, x is first added to it and the sum is what counts. */
INLINE void norm_row(Dtype dtype, const char *x, char *residual, const char *weight, char *out,
                     long width, float eps) {
    long size = size_of(dtype);
    v16 total[2] = {{0}, {0}};
    for (long i = 0; i < width; i += LANES) {
        v16 value = load_some(dtype, x + i * size, width - i);
        if (residual) {
            value = rounded(dtype, value + load_some(dtype, residual + i * size, width - i));
            store_some(dtype, residual + i * size, value, width - i);
        }
        total[i / LANES % 2] = fma16(value, value, total[i / LANES % 2]);
    }
    float scale = 1.0f / sqrtf(sum16(total[0] + total[1]) / (float)width + eps);
    const char *from = residual ? residual : x;
    for (long i = 0; i < width; i += LANES) {
        v16 value = load_some(dtype, from + i * size, width - i) * all(scale);
        v16 factor = load_some(dtype, weight + i * size, width - i);
        store_some(dtype, out + i * size, rounded(dtype, value) * factor, width - i);
    }
}

void radixcache_rms_norm(const char *x, long x_stride, char *residual, long residual_stride,
                         const char *weight, char *out, long out_stride, long rows, long width,
                         float eps, int dtype, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++) {
        const char *from = x + row * x_stride;
        char *sum = residual ? residual + row * residual_stride : 0, *to = out + row * out_stride;
        if (dtype == FLOAT32)
            norm_row(FLOAT32, from, sum, weight, to, width, eps);
        else
            norm_row(BFLOAT16, from, sum, weight, to, width, eps);
    }
}

INLINE void gate_row(Dtype dtype, const char *gate, char *out, long width) {
    long size = size_of(dtype);
    const char *up = gate + width * size;
    for (long i = 0; i < width; i += LANES) {
        v16 x = load_some(dtype, gate + i * size, width - i);
        v16 opened = rounded(dtype, x / (all(1.0f) + exp16(-x)));
        v16 y = load_some(dtype, up + i * size, width - i);
        store_some(dtype, out + i * size, opened * y, width - i);
    }
}

void radixcache_silu_and_mul(const char *gate_up, long stride, char *out, long out_stride,
                             long rows, long width, int dtype, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++) {
        if (dtype == FLOAT32)
            gate_row(FLOAT32, gate_up + row * stride, out + row * out_stride, width);
        else
            gate_row(BFLOAT16, gate_up + row * stride, out + row * out_stride, width);
    }
}

/* Turn the pairs (i, i + D/2) of one head by the angles of its position; `to` may be `from`. */
INLINE void turn_head(Dtype dtype, const char *from, const float *cos, const float *sin, char *to,
                      long half) {
    long size = size_of(dtype);
    for (long i = 0; i < half; i += LANES) {
        long count = half - i;
        v16 left = load_some(dtype, from + i * size, count);
        v16 right = load_some(dtype, from + (half + i) * size, count);
        v16 c = load_some(FLOAT32, cos + i, count), s = load_some(FLOAT32, sin + i, count);
        store_some(dtype, to + i * size, left * c - right * s, count);
        store_some(dtype, to + (half + i) * size, right * c + left * s, count);
    }
}

typedef struct {
    const char *qkv;
    const float *cos, *sin; /* tables; a token's row is that of its position */
    char *k_pool, *v_pool, *q;
    const int64_t *slots; /* negative: store nothing */
    long token_stride, head_stride, angle_stride, q_stride;
    long block_size, num_slots, block_stride, slot_stride, pool_head_stride;
    long heads, kv_heads, head_dim;
} Turn;

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
    for (long head = 0; head < t->kv_heads; head++, from += t->head_stride, place += t->pool_head_stride) {
        turn_head(dtype, from, cos, sin, t->k_pool + place, half);
        memcpy(t->v_pool + place, from + t->kv_heads * t->head_stride, width);
    }
}

/* Returns the first token whose slot is past the pool, having written nothing; else -1. */
long radixcache_rotary_store(const Turn *turn, long tokens, int dtype, int threads) {
    for (long token = 0; token < tokens; token++)
        if (turn->slots[token] >= turn->num_slots) return token;
    long width = (turn->heads + 2 * turn->kv_heads) * turn->head_dim;
#pragma omp parallel for num_threads(threads) if (tokens * width > WORTH_THREADS)
    for (long token = 0; token < tokens; token++) {
        if (dtype == FLOAT32)
            turn_token(FLOAT32, turn, token);
        else
            turn_token(BFLOAT16, turn, token);
    }
    return -1;
}
