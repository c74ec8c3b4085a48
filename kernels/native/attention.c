/* Attention over paged keys, by a list of work.

   Owns: how an item reads blocks, and how its tiles become a row of the output.
   Does not know: why the list is as it is.
   Idea: tiles stand at absolute positions, each starts from nothing, and they fold in ascending
   order; so it doesn't matter which item computes a tile, or for which rows together. */

#include "attention.h"
#include "attention_tile.h"

#define LOG2_E 1.44269504f /* weights are powers of two */
#define FEW_ROWS 12 /* rows that read values of float32 where they lie; more copy them once */

/* Where the keys and values of a tile lie. */
typedef struct {
    const char *k[TILE], *v[TILE];
} Rows;

/* What one thread works in; the arrays of rows are those of one item, head by head. */
typedef struct {
    char *q;              /* [rows][dim], as they are multiplied */
    float *keys;          /* [dim][TILE], or pairs in half as many rows */
    float *values;        /* [TILE][dim], or pairs in half as many rows */
    float *scores;        /* [MAX_ROWS][TILE] */
    float *sums;          /* [rows][dim], of all tiles so far */
    float *top, *mass;    /* [rows + MARKS] likewise */
    float **to;           /* [rows] where the sums of a tile go */
    float **marks;        /* [rows] where its top and mass go, if they are kept apart */
    int32_t *limits;      /* [rows] */
    int32_t *rows;        /* [rows] row of q */
    Rows at, ahead;       /* of this tile and the next */
} Workspace;

static const char nothing[4 * MAX_DIM];

static char *take(char **from, long bytes) {
    char *taken = *from;
    *from += (bytes + 63) / 64 * 64;
    return taken;
}

static Workspace workspace_at(char *from, const AttentionStep *s, char **end) {
    Workspace w;
    long rows = s->max_rows, dim = s->head_dim;
    w.q = take(&from, rows * dim * 4);
    w.keys = (float *)take(&from, dim * TILE * 4);
    w.values = (float *)take(&from, TILE * dim * 4);
    w.scores = (float *)take(&from, MAX_ROWS * TILE * 4);
    w.sums = (float *)take(&from, rows * dim * 4);
    w.top = (float *)take(&from, (rows + MARKS) * 4);
    w.mass = (float *)take(&from, (rows + MARKS) * 4);
    w.to = (float **)take(&from, rows * (long)sizeof(float *));
    w.marks = (float **)take(&from, rows * (long)sizeof(float *));
    w.limits = (int32_t *)take(&from, rows * 4);
    w.rows = (int32_t *)take(&from, rows * 4);
    *end = from;
    return w;
}

long radixcache_attention_scratch(const AttentionStep *step) {
    char *end;
    workspace_at(NULL, step, &end);
    return (long)(intptr_t)end;
}

/* Find the keys of a tile, of one key head; those from `end` on are zero. */
static void locate(const Attention *a, Rows *rows, int sequence, long head, long first, long end) {
    const AttentionStep *s = a->step;
    const int32_t *table = s->block_table + sequence * s->table_stride;
    long place = first / s->block_size, slot = first % s->block_size;
    long count = end - first < TILE ? end - first : TILE, i = 0;
    const char *k = a->k + head * a->k_head, *v = a->v + head * a->v_head;
    for (; i < count; place++, slot = 0) {
        const char *k_row = k + table[place] * a->k_block + slot * a->k_slot;
        const char *v_row = v + table[place] * a->v_block + slot * a->v_slot;
        long stop = i + s->block_size - slot < count ? i + s->block_size - slot : count;
        for (; i < stop; i++, k_row += a->k_slot, v_row += a->v_slot) {
            rows->k[i] = k_row;
            rows->v[i] = v_row;
        }
    }
    for (; i < TILE; i++) rows->k[i] = rows->v[i] = nothing;
}

/* Copy values to where they lie side by side, as they are multiplied. */
INLINE void copy_values(Dtype dtype, Workspace *w, long dim) {
    int steps = INNER(dtype) == FLOAT32 ? TILE : TILE / 2;
    for (int step = 0; step < steps; step++) {
        float *to = w->values + step * dim;
        for (long d = 0; d < dim; d += LANES)
            store(to + d, INNER(dtype) == FLOAT32
                              ? load_as(dtype, w->at.v[step] + d * size_of(dtype))
                              : pair_values(w->at.v, step, d));
        w->at.v[step] = (const char *)to;
    }
}

/* One tile as an item meets it. */
typedef struct {
    Workspace *w;
    long start; /* its first key */
    long dim;
    float scale;
    int apart;
} Tile;

/* The values that row i of a few sees, where the others see more or fewer. */
INLINE void add_alone(Dtype dtype, const Tile *tile, int i, int seen, const Joint *by,
                      float *const *to) {
    Workspace *w = tile->w;
    Joint alone;
    if (by) {
        alone.shrink[0] = by->shrink[i];
        alone.weight[0] = by->weight[i];
    }
    add_values(1, dtype, w->scores + i * TILE, w->at.v, NULL, seen, by ? &alone : NULL, to + i,
               tile->dim);
}

static __attribute__((noinline)) void add_alone_float32(const Tile *tile, int i, int seen,
                                                        const Joint *by, float *const *to) {
    add_alone(FLOAT32, tile, i, seen, by, to);
}

static __attribute__((noinline)) void add_alone_bfloat16(const Tile *tile, int i, int seen,
                                                         const Joint *by, float *const *to) {
    add_alone(BFLOAT16, tile, i, seen, by, to);
}

/* Count a tile's marks in, or keep them apart, of those rows that see a key of it. */
static Joint join_marks(const Tile *tile, int first, int rows, const int *seen, Marks *marks) {
    Workspace *w = tile->w;
    Joint by = {0};
    if (!tile->apart) {
        Marks so_far;
        memcpy(so_far.top, w->top + first, sizeof so_far.top);
        memcpy(so_far.mass, w->mass + first, sizeof so_far.mass);
        by = join(&so_far, marks);
        *marks = so_far;
    }
    for (int i = 0; i < rows; i++) {
        if (!seen[i]) continue;
        float *mark = w->marks[first + i];
        *(tile->apart ? mark : w->top + first + i) = marks->top[i];
        *(tile->apart ? mark + 1 : w->mass + first + i) = marks->mass[i];
    }
    return by;
}

/* One tile against rows first … first + rows; `rows` and `dtype` are known where inlined. */
INLINE void attend_block(int rows, Dtype dtype, const Tile *tile,
                         const char *const *ahead, int first) {
    Workspace *w = tile->w;
    int seen[MAX_ROWS], fewest = TILE, most = 0;
    for (int i = 0; i < rows; i++) {
        long left = w->limits[first + i] - tile->start;
        seen[i] = left < 0 ? 0 : left < TILE ? (int)left : TILE;
        fewest = seen[i] < fewest ? seen[i] : fewest;
        most = seen[i] > most ? seen[i] : most;
    }
    if (!most) return;
    Marks marks = {0};
    long q_bytes = tile->dim * size_of(INNER(dtype));
    score(rows, INNER(dtype), w->q + first * q_bytes, q_bytes, w->keys, w->scores);
    (dtype == FLOAT32 ? weigh_float32 : weigh_bfloat16)(rows, w->scores, tile->scale, seen,
                                                        &marks);
    Joint by = join_marks(tile, first, rows, seen, &marks), *joint = tile->apart ? NULL : &by;
    float *const *to = w->to + first;
    if (fewest == most) {
        add_values(rows, dtype, w->scores, w->at.v, ahead, most, joint, to, tile->dim);
        return;
    }
    for (int i = 0; i < rows; i++)
        if (seen[i])
            (dtype == FLOAT32 ? add_alone_float32 : add_alone_bfloat16)(tile, i, seen[i], joint,
                                                                        to);
}

#define CASE(n) \
    case n: attend_block(n, dtype, tile, ahead, first); break;

INLINE void attend_rows(int rows, Dtype dtype, const Tile *tile,
                        const char *const *ahead, int first) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* One tile against the rows of one key head, from `first` on. */
INLINE void attend_tile(Dtype dtype, const Tile *tile, int first, int rows) {
    Workspace *w = tile->w;
    long bytes = tile->dim * size_of(dtype);
    int few = rows <= FEW_ROWS, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    transpose_keys(dtype, w->at.k, few ? w->ahead.k : NULL, bytes / 4, w->keys);
    if (!few || dtype == BFLOAT16) copy_values(dtype, w, tile->dim);
    for (int block = 0; block < blocks; block++) {
        int from = first + rows * block / blocks, end = first + rows * (block + 1) / blocks;
        for (int i = TILE * block / blocks; !few && i < TILE * (block + 1) / blocks; i++) {
            expect(w->ahead.k[i], bytes);
            expect(w->ahead.v[i], bytes);
        }
        attend_rows(end - from, dtype, tile, few ? w->ahead.v : NULL, from);
    }
}

static void attend_tile_float32(const Tile *tile, int first, int rows) {
    attend_tile(FLOAT32, tile, first, rows);
}

static void attend_tile_bfloat16(const Tile *tile, int first, int rows) {
    attend_tile(BFLOAT16, tile, first, rows);
}

static void write_row(const Attention *a, long row, long head, const float *sums, float mass) {
    const AttentionStep *s = a->step;
    Dtype dtype = (Dtype)s->dtype;
    char *to = a->out + row * a->out_token + head * a->out_head;
    for (long d = 0; d < s->head_dim; d += LANES)
        store_as(dtype, to + d * size_of(dtype), load(sums + d) / all(mass));
}

/* Which of the parts a row's tile, or its state, is: [parts][heads]. */
static long part_of(const AttentionStep *s, long row, long head, long tile) {
    return (s->parts[row] + tile) * s->num_kv_heads * s->group + head;
}

/* The query head of a row of an item. */
static long head_of(const AttentionStep *s, const Item *item, long r) {
    return item->first_head * s->group + r / (item->num_tokens * s->group) * s->group +
           r % s->group;
}

/* Copy the queries of an item; returns the keys that its furthest row sees. */
static long read_rows(const Attention *a, const Item *item, Workspace *w) {
    const AttentionStep *s = a->step;
    Dtype dtype = (Dtype)s->dtype;
    long size = size_of(dtype), inner = size_of(INNER(dtype)), dim = s->head_dim, longest = 0;
    long count = item->num_tokens * s->group;
    for (long r = 0; r < count * item->num_heads; r++) {
        int32_t row = s->tokens[item->first_token + r % count / s->group];
        const char *from = a->q + row * a->q_token + head_of(s, item, r) * a->q_head;
        char *to = w->q + r * dim * inner;
        if (size == inner) memcpy(to, from, (size_t)(dim * size));
        else
            for (long d = 0; d < dim; d += LANES)
                store((float *)to + d, load_as(dtype, from + d * size));
        w->rows[r] = row;
        w->limits[r] = s->limits[row];
        w->to[r] = w->sums + r * s->head_dim;
        longest = w->limits[r] > longest ? w->limits[r] : longest;
    }
    return longest;
}

static void start_row(Workspace *w, long r, long dim) {
    w->top[r] = LOWEST;
    w->mass[r] = 0;
    memset(w->sums + r * dim, 0, (size_t)dim * 4);
}

/* Carry a row's state from its part, or to it. */
static void carry(const AttentionStep *s, Workspace *w, long r, long head, int back) {
    long at = part_of(s, w->rows[r], head, 0), bytes = s->head_dim * 4;
    float *sums = w->sums + r * s->head_dim, *kept = s->part_sums + at * s->head_dim;
    float *marks = s->part_marks + 2 * at;
    memcpy(back ? sums : kept, back ? kept : sums, (size_t)bytes);
    *(back ? w->top + r : marks) = back ? marks[0] : w->top[r];
    *(back ? w->mass + r : marks + 1) = back ? marks[1] : w->mass[r];
}

/* Send the tile's sums and marks to parts of their own. */
static void part_rows(const AttentionStep *s, const Item *item, Workspace *w, long rows,
                      long tile) {
    for (long r = 0; r < rows; r++) {
        long at = part_of(s, w->rows[r], head_of(s, item, r), tile);
        w->to[r] = s->part_sums + at * s->head_dim;
        w->marks[r] = s->part_marks + 2 * at;
    }
}

static void attend_item(const Attention *a, const Item *item, Workspace *w) {
    const AttentionStep *s = a->step;
    long count = item->num_tokens * s->group, rows = count * item->num_heads, dim = s->head_dim;
    long longest = read_rows(a, item, w), end = item->end_tile * TILE;
    end = end < longest ? end : longest;
    for (long r = 0; r < rows; r++) {
        if (item->mode == RESUME) carry(s, w, r, head_of(s, item, r), 1);
        else if (item->mode != APART) start_row(w, r, dim);
    }
    Tile tile = {w, item->first_tile * TILE, dim, a->scale * LOG2_E, item->mode == APART};
    locate(a, &w->ahead, item->sequence, item->first_head, tile.start, longest);
    for (; tile.start < end; tile.start += TILE) {
        if (tile.apart) part_rows(s, item, w, rows, tile.start / TILE);
        for (int h = 0; h < item->num_heads; h++) {
            int last = h + 1 == item->num_heads;
            w->at = w->ahead;
            locate(a, &w->ahead, item->sequence, item->first_head + (last ? 0 : h + 1),
                   tile.start + (last ? TILE : 0), longest);
            (s->dtype == FLOAT32 ? attend_tile_float32 : attend_tile_bfloat16)(
                &tile, (int)(h * count), (int)count);
        }
    }
    for (long r = 0; r < rows && item->mode != APART; r++) {
        if (item->mode == STATE) carry(s, w, r, head_of(s, item, r), 0);
        else write_row(a, w->rows[r], head_of(s, item, r), w->sums + r * dim, w->mass[r]);
    }
}

/* Fold the parts of rows that were computed apart. */
static void merge_item(const Attention *a, const Item *item, Workspace *w) {
    const AttentionStep *s = a->step;
    long rows = item->num_tokens * s->group * item->num_heads, dim = s->head_dim;
    for (long r = 0; r < rows; r++) {
        long token = r % (item->num_tokens * s->group) / s->group, head = head_of(s, item, r);
        int32_t row = s->tokens[item->first_token + token];
        start_row(w, 0, dim);
        Marks so_far = {{w->top[0]}, {w->mass[0]}};
        for (long tile = 0; tile * TILE < s->limits[row]; tile++) {
            long at = part_of(s, row, head, tile);
            const float *sums = s->part_sums + at * dim, *marks = s->part_marks + 2 * at;
            Marks part = {{marks[0]}, {marks[1]}};
            Joint by = join(&so_far, &part);
            for (long d = 0; d < dim; d += LANES)
                store(w->sums + d, join_sums(load(w->sums + d), load(sums + d), by.shrink[0],
                                             by.weight[0]));
        }
        write_row(a, row, head, w->sums, so_far.mass[0]);
    }
}

/* One phase of a layer, and the items before it. */
typedef struct {
    const Attention *attention;
    long first;
} Phase;

static void attend(const void *what, long item, int thread) {
    const Phase *phase = what;
    const AttentionStep *s = phase->attention->step;
    const Item *at = s->items + phase->first + item;
    char *end;
    Workspace w = workspace_at(s->scratch + thread * s->scratch_bytes, s, &end);
    (at->mode == MERGE ? merge_item : attend_item)(phase->attention, at, &w);
}

void attend_together(Team *team, const Attention *attention) {
    Phase phase = {attention, 0};
    for (int i = 0; i < PHASES; phase.first = attention->step->phase_ends[i++]) {
        long items = attention->step->phase_ends[i] - phase.first;
        if (items) work_together(team, attend, &phase, items);
    }
}

void radixcache_attention(const Attention *attention, long threads) {
    List lists[PHASES] = {0};
    if (attention->step->phase_ends[PHASES - 1] < 2) threads = 1;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Team team = {lists, omp_get_thread_num()};
        attend_together(&team, attention);
    }
}
