/* What the operations offer each other: their records, and their work item by item.

   Owns: the layout of the records that Python fills; its modules have the same fields in the same
   order.  Does not know: how an operation works. */

#pragma once

#include "vector.h"

/* Rows times a packed weight; linear.c. */
typedef struct {
    const char *x, *packed;
    const char *bias; /* or NULL */
    char *out;
    long x_stride, out_stride; /* bytes from row to row */
    long rows, outputs, inputs;
    long dtype;
} Product;

long product_items(const Product *product);
void multiply(const void *product, long item, int thread);

/* out = x / rms(x) · weight; with a residual, x is first added to it and the sum counts; rows.c. */
typedef struct {
    const char *x, *weight;
    char *residual; /* or NULL */
    char *out;
    long x_stride, residual_stride, out_stride;
    long rows, width, dtype;
    float eps;
} Norm;

long norm_items(const Norm *norm);
void normalise(const void *norm, long item, int thread);

/* The second half of each row times SiLU of the first. */
typedef struct {
    const char *gate_up;
    char *out;
    long stride, out_stride;
    long rows, width, dtype;
} Gate;

long gate_items(const Gate *gate);
void open_gates(const void *gate, long item, int thread);

/* Queries turned by their positions, keys turned and stored, values stored. */
typedef struct {
    const char *qkv;
    const float *cos, *sin; /* a row a token */
    char *k_pool, *v_pool, *q;
    const int64_t *slots; /* negative: store nothing */
    long token_stride, head_stride, angle_stride, q_stride;
    long block_size, num_slots, block_stride, slot_stride, pool_head_stride;
    long heads, kv_heads, head_dim;
    long tokens, dtype;
} Turn;

long turn_items(const Turn *turn);
void turn_and_store(const void *turn, long item, int thread);
long first_wrong_slot(const Turn *turn); /* -1: none */
