/* The records of attention, as Python fills them: records.py has the same fields in the same order.

   Owns: their layout.  Does not know: how a list is cut, or worked through. */

#pragma once

#include <stdint.h>

#include "team.h"

#define PHASES 3

/* What becomes of the tiles of an item.

   WHOLE   folded from nothing; the output is written
   STATE   folded from nothing; the result is kept as the row's part
   RESUME  folded from the row's part; the output is written
   APART   each is kept as a part of the row
   MERGE   the row's parts are folded; the output is written */
typedef enum { WHOLE, STATE, RESUME, APART, MERGE } Mode;

/* Query rows against tiles of one sequence's keys. */
typedef struct {
    int32_t mode, sequence;          /* whose blocks are read */
    int32_t first_tile, end_tile;
    int32_t first_token, num_tokens; /* entries of `tokens` */
    int32_t first_head, num_heads;   /* key heads */
} Item;

/* The work of a step: the same for all layers. */
typedef struct {
    const Item *items;
    const int32_t *tokens; /* rows of q */
    const int32_t *limits; /* of each row of q: the keys that it sees */
    const int32_t *parts;  /* of each row of q: its first part */
    const int32_t *block_table;
    float *part_sums;        /* [parts][heads][head_dim] */
    float *part_marks;       /* [parts][heads][2]: top and mass */
    char *scratch;           /* of `scratch_bytes` a thread */
    long phase_ends[PHASES]; /* of the items: one phase is done before the next begins */
    long table_stride, num_kv_heads, group, head_dim, block_size;
    long max_rows, scratch_bytes, dtype;
} AttentionStep;

/* Attention in one layer; strides in bytes. */
typedef struct {
    const AttentionStep *step;
    const char *q, *k, *v;
    char *out;
    long q_token, q_head, out_token, out_head;
    long k_block, k_slot, k_head, v_block, v_slot, v_head;
    float scale;
} Attention;

/* Do a thread's share of all phases. */
void attend_together(Team *team, const Attention *attention);
