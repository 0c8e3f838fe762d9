/* The pool of threads. Knows nothing of kernels.
 *
 * A run is a number of parts. Every thread, the caller too, begins with an equal share of
 * neighbouring parts and takes them in ascending order, so that a part can ask memory for what the
 * next one wants. Who has none left takes the upper half of another's, so a thread that the system
 * has put aside (another process wants its core) delays a run by one part at most.
 *
 *     share = generation << 32 | end << 16 | begin     parts [begin, end) not yet taken
 *
 * A share is one atomic word, and taking from it is a CAS. The generation counts runs: who takes
 * from another has seen its own share empty, and overwrites it, so both must be of one run. Who has
 * taken a part may read `work` and `context`: they do not change before all parts are
 * done. Waiting spins first, for SPIN_NANOSECONDS, then sleeps in a futex: within a layer the next
 * run follows in microseconds, and between layers the core is given back.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NANOSECONDS 50000
#define MOST_PARTS 0xffffu /* of a run; 16 bits */
#define STACK_BYTES (512 * 1024) /* a kernel keeps its tile on the stack, some 50 KiB */

/* What belongs to one thread; place 0 is the caller's. */
typedef struct {
    _Alignas(64) _Atomic uint64_t share;
    thread_pool *pool;
    pthread_t thread;
} place;

struct thread_pool {
    _Alignas(64) _Atomic uint32_t n_done;
    _Alignas(64) _Atomic uint32_t wake_word; /* changes with every run; sleepers wait on it */
    _Atomic uint32_t n_sleeping;
    _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t parked; /* do not spin until the next run */
    _Atomic uint32_t closing;
    void (*work)(void *context, int part);
    void *context;
    uint32_t n_parts;
    uint32_t generation;
    _Atomic int n_workers; /* places but the caller's */
    place places[];
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint32_t begin_of(uint64_t share)
{
    return (uint32_t)share & MOST_PARTS;
}

static uint32_t end_of(uint64_t share)
{
    return (uint32_t)(share >> 16) & MOST_PARTS;
}

static uint64_t share_of(uint64_t generation, uint32_t begin, uint32_t end)
{
    return generation << 32 | (uint64_t)end << 16 | begin;
}

/* The upper half of another's share of this run becomes the thread's own, which is empty; returns
 * its first part, or -1. */
static int take_from(place *other, place *own, uint64_t run)
{
    uint64_t share = atomic_load_explicit(&other->share, memory_order_acquire);
    while (share >> 32 == run && begin_of(share) < end_of(share)) {
        uint32_t begin = begin_of(share), end = end_of(share), middle = begin + (end - begin) / 2;
        if (!atomic_compare_exchange_weak_explicit(&other->share, &share,
                                                   share_of(run, begin, middle),
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        atomic_store_explicit(&own->share, share_of(run, middle + 1, end), memory_order_release);
        return (int)middle;
    }
    return -1;
}

/* A part that nobody has taken, or -1. */
static int take_part(place *own)
{
    thread_pool *pool = own->pool;
    uint64_t share = atomic_load_explicit(&own->share, memory_order_acquire);
    while (begin_of(share) < end_of(share))
        if (atomic_compare_exchange_weak_explicit(&own->share, &share, share + 1,
                                                  memory_order_acq_rel, memory_order_acquire))
            return (int)begin_of(share);
    int part = -1;
    for (int i = 0; part < 0 && i <= pool->n_workers; i++)
        if (pool->places + i != own)
            part = take_from(pool->places + i, own, share >> 32);
    return part;
}

/* Take and do parts until none is left. */
static void work_off(place *own)
{
    thread_pool *pool = own->pool;
    for (int part = take_part(own); part >= 0; part = take_part(own)) {
        pool->work(pool->context, part);
        atomic_fetch_add(&pool->n_done, 1);
        if (atomic_load(&pool->caller_sleeps))
            futex_wake(&pool->n_done);
    }
}

static int has_parts(thread_pool *pool)
{
    for (int i = 0; i <= pool->n_workers; i++) {
        uint64_t share = atomic_load(&pool->places[i].share);
        if (begin_of(share) < end_of(share))
            return 1;
    }
    return 0;
}

static void wait_for_parts(thread_pool *pool)
{
    int64_t deadline = now_nanoseconds() + SPIN_NANOSECONDS;
    while (!atomic_load_explicit(&pool->parked, memory_order_relaxed) &&
           now_nanoseconds() < deadline)
        for (int i = 0; i < 16; i++) {
            if (has_parts(pool))
                return;
            relax();
        }
    uint32_t word = atomic_load(&pool->wake_word);
    if (has_parts(pool) || atomic_load(&pool->closing))
        return;
    atomic_fetch_add(&pool->n_sleeping, 1);
    futex_wait(&pool->wake_word, word);
    atomic_fetch_sub(&pool->n_sleeping, 1);
}

static void *worker(void *argument)
{
    place *own = argument;
    while (!atomic_load(&own->pool->closing)) {
        work_off(own);
        wait_for_parts(own->pool);
    }
    return NULL;
}

static int start_worker(thread_pool *pool)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes))
        return -1;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all); /* signals belong to the thread that runs Python, … */
    sigdelset(&all, SIGBUS); /* … but a blocked fault would end the process without its handler */
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    place *own = pool->places + pool->n_workers + 1;
    int failed = pthread_create(&own->thread, &attributes, worker, own);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed)
        pool->n_workers++;
    return failed ? -1 : 0;
}

thread_pool *threads_open(int n_threads)
{
    size_t n_bytes = sizeof(thread_pool) + (size_t)n_threads * sizeof(place);
    thread_pool *pool = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (!pool)
        return NULL;
    memset(pool, 0, n_bytes);
    for (int i = 0; i < n_threads; i++)
        pool->places[i].pool = pool;
    while (pool->n_workers < n_threads - 1)
        if (start_worker(pool)) {
            threads_close(pool);
            return NULL;
        }
    return pool;
}

void threads_close(thread_pool *pool)
{
    atomic_store(&pool->closing, 1);
    threads_park(pool);
    atomic_fetch_add(&pool->wake_word, 1);
    futex_wake(&pool->wake_word);
    for (int i = 0; i < pool->n_workers; i++)
        pthread_join(pool->places[i + 1].thread, NULL);
    free(pool);
}

void threads_park(thread_pool *pool)
{
    atomic_store(&pool->parked, 1);
}

int threads_count(const thread_pool *pool)
{
    return pool->n_workers + 1;
}

static void wait_until_done(thread_pool *pool)
{
    int64_t deadline = now_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load(&pool->n_done) == pool->n_parts)
                return;
            relax();
        }
    } while (now_nanoseconds() < deadline);
    atomic_store(&pool->caller_sleeps, 1);
    for (;;) {
        uint32_t n_done = atomic_load(&pool->n_done);
        if (n_done == pool->n_parts)
            break;
        futex_wait(&pool->n_done, n_done);
    }
    atomic_store(&pool->caller_sleeps, 0);
}

void threads_run(thread_pool *pool, void (*work)(void *context, int part), void *context,
                 int n_parts)
{
    if (pool->n_workers == 0 || n_parts < 2 || n_parts > (int)MOST_PARTS) {
        for (int part = 0; part < n_parts; part++)
            work(context, part);
        return;
    }
    int n_threads = threads_count(pool);
    pool->work = work;
    pool->context = context;
    pool->n_parts = (uint32_t)n_parts;
    pool->generation++;
    atomic_store(&pool->n_done, 0);
    atomic_store_explicit(&pool->parked, 0, memory_order_relaxed);
    for (int i = 0, begin = 0; i < n_threads; i++) {
        int end = (int)((int64_t)n_parts * (i + 1) / n_threads);
        atomic_store(&pool->places[i].share,
                     share_of(pool->generation, (uint32_t)begin, (uint32_t)end));
        begin = end;
    }
    atomic_fetch_add(&pool->wake_word, 1);
    if (atomic_load(&pool->n_sleeping))
        futex_wake(&pool->wake_word);
    work_off(pool->places);
    wait_until_done(pool);
}
