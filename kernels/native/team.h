/* Threads that work through one list of items after another.

   Owns: who takes which item, and when a list is done.  Does not know: what an item is.
   Idea: an item is taken by whoever is free, and a list is done when its items are, not when every
   thread has come by.  So a thread that the system has put aside for a moment, beside other
   programs, holds up no one unless it holds an item; and between two lists nobody sleeps.  Which
   thread computes an item changes no bit of it. */

#pragma once

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

typedef void Work(const void *what, long item, int thread);

typedef struct {
    _Alignas(64) atomic_long next; /* item that nobody has taken */
    _Alignas(64) atomic_long done;
} List;

/* One thread's place in the lists, which all threads go through in the same order. */
typedef struct {
    List *lists; /* zeroed */
    int thread;
} Team;

#define PATIENCE 2000 /* looks before a waiting thread offers its core to others */

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Do a share of the next list, and return when all of it is done. */
static inline void work_together(Team *team, Work *work, const void *what, long items) {
    List *list = team->lists++;
    long mine = 0, item;
    while ((item = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed)) < items) {
        work(what, item, team->thread);
        mine++;
    }
    if (mine) atomic_fetch_add_explicit(&list->done, mine, memory_order_release);
    for (long looks = 0; atomic_load_explicit(&list->done, memory_order_acquire) < items; looks++)
        looks < PATIENCE ? pause_a_little() : (void)sched_yield();
}

/* Do one list alone or with `threads`, where nothing else is to follow. */
static inline void work_once(Work *work, const void *what, long items, int threads) {
    if (threads < 2 || items < 2) {
        for (long item = 0; item < items; item++) work(what, item, 0);
        return;
    }
    List list = {0};
#pragma omp parallel num_threads(threads)
    {
        Team team = {&list, omp_get_thread_num()};
        work_together(&team, work, what, items);
    }
}
