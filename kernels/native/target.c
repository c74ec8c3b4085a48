/* What the kernels were compiled for.

   Owns: the name of the instruction set.  Does not know: any operation. */

#include "vector.h"

#if PAIRS
#define NAME "AVX-512 with BF16"
#elif LANES == 16 && defined(__AVX512F__)
#define NAME "AVX-512"
#elif LANES == 8 && defined(__FMA__)
#define NAME "AVX2 and FMA"
#elif defined(__ARM_NEON)
#define NAME "NEON"
#elif defined(__SSE2__) && LANES == 4
#define NAME "SSE2"
#else
#define NAME "no vector instructions"
#endif

const char *radixcache_target(void) { return NAME; }
