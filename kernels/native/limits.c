/* What this machine reaches at best: multiplications in registers, and reading memory.

   Owns: two loops that do nothing else.  Does not know: operations, clocks. */

#include "team.h"
#include "vector.h"

#define CHAINS 12 /* enough that none waits for its own last result */

typedef struct {
    const char *data; /* to read, or NULL to multiply */
    long bytes;       /* of an item; or steps, of CHAINS · LANES multiply-adds */
    float *results;   /* one an item, so that the work counts */
} Load;

static float multiply_steps(long steps) {
    vec total[CHAINS], x = all(0.5f), y = all(0.25f);
    UNROLL
    for (int i = 0; i < CHAINS; i++) total[i] = all((float)i);
    for (long step = 0; step < steps; step++) {
        UNROLL
        for (int i = 0; i < CHAINS; i++) total[i] = fma_vec(total[i], x, y);
    }
    UNROLL
    for (int i = 1; i < CHAINS; i++) total[0] += total[i];
    return sum_of_lanes(total[0])[0];
}

static float read_bytes(const char *from, long bytes) {
    vec total[8] = {0};
    for (long i = 0; i + 32 * LANES <= bytes; i += 32 * LANES) {
        UNROLL
        for (int j = 0; j < 8; j++) total[j] += load((const float *)(from + i) + j * LANES);
    }
    return sum_of_vectors(8, total)[0];
}

static void carry_load(const void *what, long item, int thread) {
    (void)thread;
    const Load *l = what;
    l->results[item] = l->data ? read_bytes(l->data + item * l->bytes, l->bytes)
                               : multiply_steps(l->bytes);
}

/* Returns how many floating-point operations a step is. */
long radixcache_carry_load(const Load *load, long items, long threads) {
    work_once(carry_load, load, items, (int)threads);
    return 2 * CHAINS * LANES;
}
