/* The layout of a panel in each format, and the scales of a block.

   Owns: where each field is.  Does not know: what is computed with it.

   A panel holds 32 outputs.  It is a list of blocks of 32 inputs, in which each field below stands
   32 times, output by output:

       halves    scale [, minimum]        float16       formats without super-blocks
       bytes     scales [, minimum]       8 bits        factors, in super-blocks
       words     4 bits of each q         byte j of word w: inputs 8w + j and 8w + 4 + j
                 the 5th bit              bit i: input i
                 the 5th and 6th          bits 2i and 2i + 1 of word h: input 16h + i
                 8 bits of each q         byte j of word w: input 4w + j

   A super-block is eight blocks, behind what their factors are multiplied with: halves, a scale
   [and a minimum].  F32 is [inputs][PANEL], BF16 and F16 are pairs of inputs: [pairs][PANEL]. */

#pragma once

#include <stddef.h>

#include "kernels.h"

typedef struct {
    int bits, zero, minimum;
    int super;      /* blocks of a super-block, or 0 */
    int scales;     /* of a block in a super-block */
    int file_bytes; /* of a block, or super-block, as the file has it */
} Shape;

#define SHAPE_Q4_0 4, 8, 0, 0, 1, 18
#define SHAPE_Q4_1 4, 0, 1, 0, 1, 20
#define SHAPE_Q5_0 5, 16, 0, 0, 1, 22
#define SHAPE_Q5_1 5, 0, 1, 0, 1, 24
#define SHAPE_Q8_0 8, 128, 0, 0, 1, 34
#define SHAPE_Q4_K 4, 0, 1, 8, 1, 144
#define SHAPE_Q5_K 5, 0, 1, 8, 1, 176
#define SHAPE_Q6_K 6, 32, 0, 8, 2, 210

/* Every quantised format, for what is written once for each. */
#define EACH_QUANTISED(write) \
    write(Q4_0) write(Q4_1) write(Q5_0) write(Q5_1) write(Q8_0) write(Q4_K) write(Q5_K) write(Q6_K)

#define SHAPE(name) [name] = {SHAPE_##name},
static const Shape shapes[NUM_FORMATS] = {EACH_QUANTISED(SHAPE)};

INLINE long halves_bytes(const Shape *s) { return (1 + s->minimum) * PANEL * 2; }

/* Bytes of a block in a panel, without those of its super-block. */
INLINE long block_bytes(const Shape *s) {
    long scales = s->super ? (s->scales + s->minimum) * PANEL : halves_bytes(s);
    return scales + s->bits * PANEL * 4;
}

INLINE long block_at(const Shape *s, long block) {
    if (!s->super) return block * block_bytes(s);
    return (block / s->super + 1) * halves_bytes(s) + block * block_bytes(s);
}

INLINE uvec load_words(const char *from) {
    uvec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE vec unsigned_factors(const char *from) {
    bytes x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, ivec), vec);
}

INLINE vec signed_factors(const char *from) {
    signed_bytes x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, ivec), vec);
}

/* What the integers of a block are multiplied by, and what is added. */
typedef struct {
    vec scale[2], minimum;
} Scales;

/* `at` is that of the block, `above` that of its super-block, at the same outputs. */
INLINE Scales block_scales(const Shape *s, const char *block, const char *above, long lane) {
    Scales found;
    if (!s->super) {
        found.scale[0] = found.scale[1] = load_float16(block + 2 * lane);
        if (s->minimum) found.minimum = load_float16(block + 2 * (PANEL + lane));
        return found;
    }
    vec scale = load_float16(above + 2 * lane);
    for (int i = 0; i < 2; i++) {
        const char *factors = block + (s->scales == 2 ? i : 0) * PANEL + lane;
        found.scale[i] = scale * (s->minimum ? unsigned_factors(factors) : signed_factors(factors));
    }
    if (s->minimum)
        found.minimum = -(load_float16(above + 2 * (PANEL + lane)) *
                          unsigned_factors(block + PANEL + lane));
    return found;
}

/* Where a block is, and its super-block. */
INLINE const char *find_block(const Shape *s, const char *panel, long block, const char **above) {
    *above = s->super ? panel + block_at(s, block - block % s->super) - halves_bytes(s) : NULL;
    return panel + block_at(s, block);
}

INLINE const char *words_of(const Shape *s, const char *block) {
    return block + block_bytes(s) - s->bits * PANEL * 4;
}
