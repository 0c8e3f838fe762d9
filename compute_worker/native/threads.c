/* The pool of threads. Knows nothing of kernels.
 *
 * A run is a number of parts that threads take one after the other, so a thread that the system
 * has put aside (another process wants its core) delays a run by one part at most. The caller
 * works too.
 *
 *     ticket = generation << 32 | parts not yet taken        one atomic word: taking is a CAS
 *
 * Who has taken a part may read `work` and `context`: they do not change before all parts are
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
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NANOSECONDS 50000
#define STACK_BYTES (512 * 1024) /* a kernel keeps its tile on the stack, some 50 KiB */

struct thread_pool {
    _Alignas(64) _Atomic uint64_t ticket;
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
    int n_workers;
    pthread_t workers[];
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

/* Take and do parts until none is left. */
static void work_off(thread_pool *pool)
{
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    while ((uint32_t)ticket != 0) {
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        uint32_t n_parts = pool->n_parts;
        pool->work(pool->context, (int)(n_parts - (uint32_t)ticket));
        atomic_fetch_add(&pool->n_done, 1);
        if (atomic_load(&pool->caller_sleeps))
            futex_wake(&pool->n_done);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static int has_parts(thread_pool *pool)
{
    return (uint32_t)atomic_load(&pool->ticket) != 0;
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
    thread_pool *pool = argument;
    while (!atomic_load(&pool->closing)) {
        work_off(pool);
        wait_for_parts(pool);
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
    int failed = pthread_create(&pool->workers[pool->n_workers], &attributes, worker, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed)
        pool->n_workers++;
    return failed ? -1 : 0;
}

thread_pool *threads_open(int n_threads)
{
    size_t n_bytes = sizeof(thread_pool) + (size_t)n_threads * sizeof(pthread_t);
    thread_pool *pool = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (!pool)
        return NULL;
    *pool = (thread_pool){0};
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
        pthread_join(pool->workers[i], NULL);
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
    if (pool->n_workers == 0 || n_parts < 2) {
        for (int part = 0; part < n_parts; part++)
            work(context, part);
        return;
    }
    pool->work = work;
    pool->context = context;
    pool->n_parts = (uint32_t)n_parts;
    pool->generation++;
    atomic_store(&pool->n_done, 0);
    atomic_store_explicit(&pool->parked, 0, memory_order_relaxed);
    atomic_store(&pool->ticket, (uint64_t)pool->generation << 32 | (uint32_t)n_parts);
    atomic_fetch_add(&pool->wake_word, 1);
    if (atomic_load(&pool->n_sleeping))
        futex_wake(&pool->wake_word);
    work_off(pool);
    wait_until_done(pool);
}
