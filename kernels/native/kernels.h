/* What the operations offer each other: their records, and their work item by item.

   Owns: the layout of the records that Python fills; its modules have the same fields in the same
   order.  Does not know: how an operation works. */

#pragma once

#include "vector.h"

/* Bytes that a thread finds on its stack for one item: OpenMP's threads have 2 MiB at least. */
#define STACK_ROOM (384 * 1024)

/* How a part of a matrix is stored; formats.h has the layouts.  kernels/formats.py has the same
   order. */
typedef enum {
    F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, NUM_FORMATS
} Format;

#define PANEL 32   /* outputs that stand side by side in every format */
#define BLOCK 32   /* inputs that share a scale, or lie together */
#define MAX_PARTS 3

/* Rows of a matrix that are stored alike. */
typedef struct {
    const char *packed; /* [panels] of `panel_bytes` */
    long format, outputs;
} Part;

/* A weight [outputs, inputs], packed: its parts one below the other. */
typedef struct {
    Part parts[MAX_PARTS];
    long num_parts, outputs, inputs;
    long int8; /* whether products round their rows to 8 bits */
} Matrix;

long panel_bytes(Format format, long inputs);

/* The panels of all parts, and the part in which one of them is: `panel` becomes its number there,
   `column` its first output. */
long panels_of(const Matrix *matrix);
const Part *part_of_panel(const Matrix *matrix, long *panel, long *column);

/* Some inputs of a panel, as products read them: [inputs][PANEL] in float32, or [pairs][PANEL]
   where the dtype is bfloat16 and the target multiplies pairs.  `first` is a multiple of BLOCK.
   What is stored that way is not copied; `room` holds count · PANEL floats. */
const float *panel_weights(const Part *part, long inputs, long panel, long first, long count,
                           Dtype dtype, float *room);

/* One row of float32 times some inputs of a panel that is not F32: adds to `sums` [PANEL] what
   products with `panel_weights` in float32 would, bit for bit. */
void multiply_row(const Part *part, long inputs, long panel, long first, long count, const float *x,
                  float *sums);

/* Rows times a packed weight; linear.c. */
typedef struct {
    const Matrix *matrix;
    const char *x;
    const char *bias; /* or NULL */
    char *out;
    char *rounded; /* room for the rows in 8 bits; NULL where they are not rounded */
    long x_stride, out_stride; /* bytes from row to row */
    long rows;
    long dtype; /* of x, bias and out */
} Product;

/* A row in 8 bits: x is about q · scale, block by block; integers.c. */
typedef struct {
    int8_t *q;
    float *scales; /* [inputs / BLOCK] */
    float *sums;   /* [inputs / BLOCK][2]: of q, in either half of a block */
} RoundedRow;

long rounding_items(const Product *product);
void round_rows(const void *product, long item, int thread);

/* Rounded rows times a quantised panel: adds to `sums` [rows][PANEL]. */
void multiply_rounded(const Product *product, const Part *part, long panel, long start, long rows,
                      float *sums);

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
