/* Layers of a Llama-like decoder, one after another, in one call.

   Owns: the order of a layer's operations, as runtime/models/llama.py has it.  Does not know: how
   an operation works.
   Idea: a step of one row has thousands of small lists of work.  Called one by one each would wake
   the threads anew and hold the interpreter's lock in between; here they wake once a step. */

#include "attention.h"
#include "kernels.h"
#include "team.h"

typedef struct {
    const char *attention_norm, *ffn_norm;
    const char *qkv_bias, *out_bias; /* or NULL */
    Matrix qkv, out, gate_up, down;
} Layer;

/* Rows are dense.  What only a part of the rows needs at a time has room for one part. */
typedef struct {
    const Layer *layers;
    char *residual, *added; /* [tokens][hidden], both in and out */
    char *normed;           /* [part][hidden] */
    char *mixed;            /* [part][(heads + 2 kv_heads) dim] */
    char *attended;         /* [tokens][heads dim] */
    char *gate_up, *gated;  /* [part][2 ffn] and [part][ffn] */
    char *rounded;          /* room for [part] rows in 8 bits, where a matrix asks for them */
    long num_layers, hidden, ffn;
    long part;           /* rows that go through half a layer together, to stay in the caches */
    long pool_stride;    /* bytes from a layer's K and V to the next layer's */
    Turn turn;           /* of the first layer, from `mixed` */
    Attention attention; /* of the first layer, to `attended` */
    float eps;
} Decoder;

/* Rows first … first + count of the step. */
typedef struct {
    long first, count;
} Stretch;

static void norm(Team *team, const Decoder *d, Stretch part, const char *weight) {
    long stride = d->hidden * size_of(d->turn.dtype), from = part.first * stride;
    Norm n = {d->added + from, weight, d->residual + from, d->normed, stride, stride, stride,
              part.count, d->hidden, d->turn.dtype, d->eps};
    work_together(team, normalise, &n, norm_items(&n));
}

static void product(Team *team, const Decoder *d, long rows, const char *x, const Matrix *matrix,
                    const char *bias, char *out) {
    long size = size_of(d->turn.dtype);
    Product p = {matrix, x, bias, out, matrix->int8 ? d->rounded : NULL, matrix->inputs * size,
                 matrix->outputs * size, rows, d->turn.dtype};
    if (p.rounded) work_together(team, round_rows, &p, rounding_items(&p));
    work_together(team, multiply, &p, product_items(&p));
}

/* From what came before to queries, and to keys and values in their slots. */
static void before_attention(Team *team, const Decoder *d, long index, Stretch part) {
    const Layer *layer = d->layers + index;
    Turn turn = d->turn;
    norm(team, d, part, layer->attention_norm);
    product(team, d, part.count, d->normed, &layer->qkv, layer->qkv_bias, d->mixed);
    turn.tokens = part.count;
    turn.cos += part.first * turn.angle_stride;
    turn.sin += part.first * turn.angle_stride;
    turn.slots += part.first;
    turn.q += part.first * turn.q_stride;
    turn.k_pool += index * d->pool_stride;
    turn.v_pool += index * d->pool_stride;
    work_together(team, turn_and_store, &turn, turn_items(&turn));
}

/* From what was attended to what the next layer adds. */
static void after_attention(Team *team, const Decoder *d, long index, Stretch part) {
    const Layer *layer = d->layers + index;
    long size = size_of(d->turn.dtype), width = d->turn.heads * d->turn.head_dim;
    char *added = d->added + part.first * d->hidden * size;
    product(team, d, part.count, d->attended + part.first * width * size, &layer->out,
            layer->out_bias, added);
    norm(team, d, part, layer->ffn_norm);
    product(team, d, part.count, d->normed, &layer->gate_up, NULL, d->gate_up);
    Gate gate = {d->gate_up, d->gated, 2 * d->ffn * size, d->ffn * size,
                 part.count, d->ffn, d->turn.dtype};
    work_together(team, open_gates, &gate, gate_items(&gate));
    product(team, d, part.count, d->gated, &layer->down, NULL, added);
}

static Stretch part_at(const Decoder *d, long first) {
    long left = d->turn.tokens - first;
    return (Stretch){first, left < d->part ? left : d->part};
}

static void decode(Team *team, const Decoder *d) {
    for (long i = 0; i < d->num_layers; i++) {
        for (long first = 0; first < d->turn.tokens; first += d->part)
            before_attention(team, d, i, part_at(d, first));
        Attention attention = d->attention;
        attention.k += i * d->pool_stride;
        attention.v += i * d->pool_stride;
        attend_together(team, &attention);
        for (long first = 0; first < d->turn.tokens; first += d->part)
            after_attention(team, d, i, part_at(d, first));
    }
}

/* `lists` are 3 a layer and 12 a part of it, zeroed.  Returns the first token whose slot is past
   the pool, having computed nothing; else -1. */
long radixcache_decoder(const Decoder *decoder, List *lists, long threads) {
    long wrong = first_wrong_slot(&decoder->turn);
    if (wrong >= 0) return wrong;
#pragma omp parallel num_threads((int)threads)
    {
        Team team = {lists, omp_get_thread_num()};
        decode(&team, decoder);
    }
    return -1;
}
