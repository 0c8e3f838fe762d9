/* A pool of threads that runs one function on all of them. See threads.c. */
#ifndef MOE_THREADS_H
#define MOE_THREADS_H

typedef struct thread_pool thread_pool;

/* n_threads counts the calling thread. NULL where threads cannot be started. */
thread_pool *threads_open(int n_threads);
void threads_close(thread_pool *pool);
void threads_park(thread_pool *pool);
int threads_count(const thread_pool *pool);

/* Runs work(context, part) once for every part of [0, n_parts), in any order, on any thread;
 * returns when all are done. Parts must not depend on each other. */
void threads_run(thread_pool *pool, void (*work)(void *context, int part), void *context,
                 int n_parts);

#endif
