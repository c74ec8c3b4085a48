/* Layers of a Llama-like decoder, one after another, in one call.

   Owns: the order of a layer's operations, as runtime/models/llama.py has it.  Does not know: how
   an operation works.
   Idea: a step of one row has thousands of small lists of work.  Called one by one each would wake
   the threads anew and hold the interpreter's lock in between; here they wake once a step. */

#include "attention.h"
#include "kernels.h"
#include "team.h"

typedef struct {
    const char *attention_norm;
    const char *qkv, *qkv_bias; /* biases may be NULL */
    const char *out, *out_bias;
    const char *ffn_norm;
    const char *gate_up, *down;
} Layer;

/* Rows are dense; the buffers hold one row a token. */
typedef struct {
    const Layer *layers;
    char *residual, *added; /* [tokens][hidden], both in and out */
    char *normed;           /* [tokens][hidden] */
    char *mixed, *attended; /* [tokens][(heads + 2 kv_heads) dim], [tokens][heads dim] */
    char *gate_up, *gated;  /* [tokens][2 ffn] and [tokens][ffn] */
    long num_layers, hidden, ffn;
    long pool_stride;    /* bytes from a layer's K and V to the next layer's */
    Turn turn;           /* of the first layer, from `mixed` */
    Attention attention; /* of the first layer, to `attended` */
    float eps;
} Decoder;

static void norm(Team *team, const Decoder *d, const char *weight) {
    long stride = d->hidden * size_of(d->turn.dtype);
    Norm n = {d->added, weight, d->residual, d->normed, stride, stride, stride,
              d->turn.tokens, d->hidden, d->turn.dtype, d->eps};
    work_together(team, normalise, &n, norm_items(&n));
}

static void product(Team *team, const Decoder *d, const char *x, long inputs, const char *weight,
                    const char *bias, char *out, long outputs) {
    long size = size_of(d->turn.dtype);
    Product p = {x, weight, bias, out, inputs * size, outputs * size,
                 d->turn.tokens, outputs, inputs, d->turn.dtype};
    work_together(team, multiply, &p, product_items(&p));
}

static void decode(Team *team, const Decoder *d) {
    const Turn *first = &d->turn;
    long size = size_of(first->dtype);
    long width = first->heads * first->head_dim, kv_width = first->kv_heads * first->head_dim;
    for (long i = 0; i < d->num_layers; i++) {
        const Layer *layer = d->layers + i;
        norm(team, d, layer->attention_norm);
        product(team, d, d->normed, d->hidden, layer->qkv, layer->qkv_bias, d->mixed,
                width + 2 * kv_width);
        Turn turn = *first;
        turn.k_pool += i * d->pool_stride;
        turn.v_pool += i * d->pool_stride;
        work_together(team, turn_and_store, &turn, turn_items(&turn));
        Attention attention = d->attention;
        attention.k += i * d->pool_stride;
        attention.v += i * d->pool_stride;
        attend_together(team, &attention);
        product(team, d, d->attended, width, layer->out, layer->out_bias, d->added, d->hidden);
        norm(team, d, layer->ffn_norm);
        product(team, d, d->normed, d->hidden, layer->gate_up, NULL, d->gate_up, 2 * d->ffn);
        Gate gate = {d->gate_up, d->gated, 2 * d->ffn * size, d->ffn * size,
                     first->tokens, d->ffn, first->dtype};
        work_together(team, open_gates, &gate, gate_items(&gate));
        product(team, d, d->gated, d->ffn, layer->down, NULL, d->added, d->hidden);
    }
}

/* `lists` are 12 a layer, zeroed.  Returns the first token whose slot is past the pool, having
   computed nothing; else -1. */
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
