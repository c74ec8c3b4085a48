/* The list of work of one step of attention.

   Owns: which query rows meet which tiles of whose keys.  Does not know: q, K or V.
   Idea: a tile has the same bits wherever it is computed, so the list follows speed alone.

       enough rows for the threads    a row folds all its tiles in one item
       too few                        tiles are dealt out, kept apart, and merged in another phase
       sequences that begin alike     the queries of all meet the tiles that they share; each
                                      resumes from there in another phase, or merges as above

       group of 3     | tile 0 | tile 1 |         the queries of all together
       sequence a     |        |        | tile 2 | tile 3 |
       sequence b     |        |        | tile 2 | */

#include <stddef.h>

#include "attention.h"

#define ITEMS_A_THREAD 4
#define ENOUGH_ROWS 24 /* of an item: fewer would lay out keys too often */

typedef struct {
    const int32_t *seq_lens, *q_start;      /* [sequences], [sequences + 1] */
    const int32_t *members, *starts, *lens; /* of groups, see SharedPrefixes */
    const int32_t *block_table;
    long num_sequences, num_members, num_groups;
    long table_stride, num_blocks, block_size;
    long max_rows, num_kv_heads, group, tile, room, threads;
    int32_t *skipped;                       /* [sequences] tiles that a group reads for it */
    Item *items;                            /* NULL to count only */
    int32_t *tokens, *limits, *parts;
    long phase_ends[PHASES], num_entries, num_parts;
    long wrong;   /* a sequence whose lengths can't be, or -1 */
    long lacking; /* a sequence with keys in no block of the pool, or -1 */
} Listing;

/* How the work of a step is cut. */
typedef struct {
    long tokens; /* of an item */
    long heads;  /* of an item, where its rows are few */
    int apart;
    long items;  /* to make of one head's tiles, where they are dealt out */
} Cut;

static long least(long a, long b) { return a < b ? a : b; }

static long parts_of(long whole, long part) { return (whole + part - 1) / part; }

/* Add items for one tile of query rows: all heads at once where that suits. */
static void add_item(Listing *list, long *num_items, const Cut *cut, Item item) {
    long fitting = list->max_rows / (item.num_tokens * list->group);
    long heads = least(cut->heads, fitting > 0 ? fitting : 1);
    for (long head = 0; head < list->num_kv_heads; head += heads) {
        item.first_head = (int32_t)head;
        item.num_heads = (int32_t)least(heads, list->num_kv_heads - head);
        if (list->items) list->items[*num_items] = item;
        ++*num_items;
    }
}

/* Add the tiles of an item a few at a time. */
static void deal_out(Listing *list, long *num_items, const Cut *cut, Item item) {
    int32_t end = item.end_tile;
    int32_t few = (int32_t)parts_of(end - item.first_tile, cut->items);
    for (; item.first_tile < end; item.first_tile += few) {
        item.end_tile = (int32_t)least(item.first_tile + few, end);
        add_item(list, num_items, cut, item);
    }
}

/* Tiles that a group reads for its members: all in the blocks of the first. */
static long shared_tiles(const Listing *list, long group) {
    long first = list->starts[group];
    if (first >= least(list->starts[group + 1], list->num_members)) return 0;
    return least(list->lens[group], list->seq_lens[list->members[first]]) / list->tile;
}

/* The queries of a group against what all its members have in common. */
static void list_group(Listing *list, long *num_items, const Cut *cut, long group) {
    long start = least(list->starts[group], list->num_members);
    long end = least(list->starts[group + 1], list->num_members);
    long shared = shared_tiles(list, group), entry = list->num_entries;
    if (start >= end || shared == 0) return;
    for (long m = start; m < end; m++) {
        long sequence = list->members[m];
        for (long row = list->q_start[sequence]; row < list->q_start[sequence + 1]; row++) {
            if (list->items) list->tokens[list->num_entries] = (int32_t)row;
            list->num_entries++;
        }
    }
    for (; entry < list->num_entries; entry += cut->tokens) {
        Item item = {.mode = cut->apart ? APART : STATE, .sequence = list->members[start],
                     .end_tile = (int32_t)shared, .first_token = (int32_t)entry,
                     .num_tokens = (int32_t)least(cut->tokens, list->num_entries - entry)};
        if (cut->apart) deal_out(list, num_items, cut, item);
        else add_item(list, num_items, cut, item);
    }
}

static int is_apart(const Listing *list, const Cut *cut, long sequence) {
    return cut->apart && list->seq_lens[sequence] > list->tile;
}

/* The rows of a sequence: what they see, and where their parts are. */
static void list_rows(Listing *list, const Cut *cut, long sequence) {
    long row = list->q_start[sequence], end = list->q_start[sequence + 1];
    long limit = list->seq_lens[sequence] - (end - row);
    for (; row < end; row++, list->num_entries++) {
        limit++;
        if (list->items) {
            list->tokens[list->num_entries] = (int32_t)row;
            list->limits[row] = (int32_t)limit;
            list->parts[row] = (int32_t)list->num_parts;
        }
        if (is_apart(list, cut, sequence)) list->num_parts += parts_of(limit, list->tile);
        else list->num_parts += list->skipped[sequence] > 0;
    }
}

/* The tiles of a sequence's own queries that belong to a phase, the longest first. */
static void list_sequence(Listing *list, long *num_items, const Cut *cut, long phase,
                          long sequence, long entry) {
    long count = list->q_start[sequence + 1] - list->q_start[sequence];
    long before = list->seq_lens[sequence] - count, skipped = list->skipped[sequence];
    int apart = is_apart(list, cut, sequence);
    if (apart ? phase == 1 : phase != (skipped > 0)) return;
    Mode mode = phase == 2 ? MERGE : apart ? APART : skipped ? RESUME : WHOLE;
    for (long i = parts_of(count, cut->tokens) - 1; i >= 0; i--) {
        long first = i * cut->tokens, size = least(cut->tokens, count - first);
        Item item = {.mode = mode, .sequence = (int32_t)sequence, .first_tile = (int32_t)skipped,
                     .end_tile = (int32_t)parts_of(before + first + size, list->tile),
                     .first_token = (int32_t)(entry + first), .num_tokens = (int32_t)size};
        if (mode == APART) deal_out(list, num_items, cut, item);
        else add_item(list, num_items, cut, item);
    }
}

/* Items of one head that the step makes with so many tokens each. */
static long count_units(const Listing *list, long tokens) {
    long units = 0;
    for (long g = 0; g < list->num_groups; g++) {
        long count = 0, end = least(list->starts[g + 1], list->num_members);
        for (long m = list->starts[g]; m < end && shared_tiles(list, g); m++)
            count += list->q_start[list->members[m] + 1] - list->q_start[list->members[m]];
        units += parts_of(count, tokens);
    }
    for (long s = 0; s < list->num_sequences; s++)
        if (!list->skipped[s])
            units += parts_of(list->q_start[s + 1] - list->q_start[s], tokens);
    return units;
}

static Cut choose_cut(const Listing *list) {
    long wanted = list->threads > 1 ? ITEMS_A_THREAD * list->threads : 1;
    long tokens = list->max_rows / list->group, units;
    tokens = tokens > 0 ? tokens : 1;
    while ((units = count_units(list, tokens)) * list->num_kv_heads < wanted &&
           tokens / 2 * list->group >= ENOUGH_ROWS)
        tokens /= 2;
    Cut cut = {tokens, units < wanted ? 1 : list->num_kv_heads,
               units * list->num_kv_heads < wanted, 1};
    if (units) cut.items = parts_of(2 * wanted, units * list->num_kv_heads);
    return cut;
}

static int is_wrong(const Listing *list, long s) {
    long count = list->q_start[s + 1] - list->q_start[s];
    return count < 0 || count > list->seq_lens[s] || list->seq_lens[s] > list->room;
}

static int lacks_blocks(const Listing *list, long s) {
    const int32_t *blocks = list->block_table + s * list->table_stride;
    for (long i = 0; i * list->block_size < list->seq_lens[s]; i++)
        if (blocks[i] < 0 || blocks[i] >= list->num_blocks) return 1;
    return 0;
}

/* Count, or fill, the list. */
void radixcache_attention_list(Listing *list) {
    list->num_entries = list->num_parts = 0;
    list->wrong = list->q_start[0] ? 0 : -1;
    list->lacking = -1;
    for (long s = 0; s < list->num_sequences; s++) {
        if (is_wrong(list, s)) list->wrong = s;
        else if (lacks_blocks(list, s)) list->lacking = s;
        list->skipped[s] = 0;
    }
    for (long m = 0; m < list->num_members; m++)
        if (list->members[m] < 0 || list->members[m] >= list->num_sequences) list->wrong = 0;
    for (long g = 0; list->num_groups && g <= list->num_groups; g++)
        if (list->starts[g] < 0) list->wrong = 0;
    if (list->wrong >= 0) return;
    for (long g = 0; g < list->num_groups; g++) {
        long end = least(list->starts[g + 1], list->num_members);
        for (long m = list->starts[g]; m < end; m++)
            list->skipped[list->members[m]] = (int32_t)shared_tiles(list, g);
    }
    Cut cut = choose_cut(list);
    long num_items = 0;
    for (long g = 0; g < list->num_groups; g++) list_group(list, &num_items, &cut, g);
    long own = list->num_entries;
    for (long s = 0; s < list->num_sequences; s++) list_rows(list, &cut, s);
    for (long phase = 0; phase < PHASES; phase++) {
        for (long s = 0; s < list->num_sequences; s++)
            list_sequence(list, &num_items, &cut, phase, s, own + list->q_start[s]);
        list->phase_ends[phase] = num_items;
    }
}
