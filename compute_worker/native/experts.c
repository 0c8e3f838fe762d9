/* The feed-forward blocks of a layer's experts, a round of several experts at a time.
 *
 *     part of phase 1   some rows of gate and up of one expert: inner = silu(gate x) * (up x); each
 *                       group of 32 values is prepared at once as activations of phase 2
 *     part of phase 2   some rows of down of one expert, written to the rows of its pairs
 *
 * A round holds experts with ROUND_PAIRS pairs together, so that the inner activations stay in the
 * cache; an expert with more pairs than that goes in several rounds, each unpacking its weights.
 */
#include <string.h>

#include "engine.h"
#include "threads.h"

enum {
    ROUND_PAIRS = 256,
    DOWN_ROWS = 128,     /* rows of a part of phase 2, and at most of a part of phase 1: 20 to 40 us */
    GATE_VALUES = 2048,  /* rows × tokens of a part of phase 1: gate and up lie on the stack */
};

/* The pairs [first, first + n) of the round use this expert. */
typedef struct {
    const uint8_t *gate, *up, *down;
    int first, n;
} expert_share;

typedef struct {
    const moe_engine *engine;
    int numerics, width, expert_width, gate_rows;
    const type_kernels *gate, *up, *down;
    activations input, inner;
    int n_shares, n_pairs;
    expert_share shares[ROUND_PAIRS];
    int32_t tokens[ROUND_PAIRS];
    int32_t out_rows[ROUND_PAIRS];
    float *out;
} experts_round;

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

static int parts_of(int n_rows, int rows_per_part)
{
    return (n_rows + rows_per_part - 1) / rows_per_part;
}

/* Rows [begin, begin + n) of gate or up times tokens [first, first + n_tokens) of the round. */
static void multiply_inner(const experts_round *round, const type_kernels *type,
                           const uint8_t *weights, const uint8_t *next, int begin, int end,
                           int first, int n_tokens, float *out)
{
    row_job job = {
        .weights = weights, .next = next, .n_columns = round->width,
        .row_bytes = row_bytes_of(type, round->width), .input = &round->input,
        .tokens = round->tokens + first, .n_tokens = n_tokens, .out = out,
        .out_stride = (size_t)round->gate_rows, .out_begin = begin,
    };
    type->multiply[round->numerics](&job, &round->engine->grids, begin, end);
}

/* One group of the inner activations of a pair, from its gate and up values. */
static void prepare_inner(experts_round *round, int pair, int group, const float *gate,
                          const float *up)
{
    size_t at = (size_t)pair * (size_t)round->inner.n_groups + (size_t)group;
    round->engine->set->silu_product(gate, up, round->inner.values + GROUP * at, GROUP);
    if (round->inner.planes)
        round->engine->set->prepare(&round->inner, pair, group, group + 1);
}

static void gate_up_part(void *context, int part)
{
    experts_round *round = context;
    int n_parts = parts_of(round->expert_width, round->gate_rows);
    const expert_share *share = round->shares + part / n_parts;
    int begin = part % n_parts * round->gate_rows;
    int end = smaller(begin + round->gate_rows, round->expert_width);
    int at_once = GATE_VALUES / round->gate_rows, stride = round->gate_rows;
    size_t up_begin = (size_t)begin * row_bytes_of(round->up, round->width);
    size_t gate_end = (size_t)end * row_bytes_of(round->gate, round->width);
    float gate[GATE_VALUES], up[GATE_VALUES];
    if ((end - begin) % GROUP) { /* the last group is filled up with zeros */
        memset(gate, 0, sizeof gate);
        memset(up, 0, sizeof up);
    }
    for (int done = 0; done < share->n; done += at_once) {
        int first = share->first + done, n = smaller(at_once, share->n - done);
        multiply_inner(round, round->gate, share->gate, share->up + up_begin, begin, end, first, n,
                       gate);
        multiply_inner(round, round->up, share->up, share->gate + gate_end, begin, end, first, n, up);
        for (int i = 0; i < n; i++)
            for (int row = 0; row < end - begin; row += GROUP) {
                int group = (begin + row) / GROUP;
                prepare_inner(round, first + i, group, gate + i * stride + row, up + i * stride + row);
            }
    }
}

static void down_part(void *context, int part)
{
    const experts_round *round = context;
    int n_parts = parts_of(round->width, DOWN_ROWS);
    const expert_share *share = round->shares + part / n_parts;
    int begin = part % n_parts * DOWN_ROWS, end = smaller(begin + DOWN_ROWS, round->width);
    size_t row_bytes = row_bytes_of(round->down, round->expert_width);
    int is_last = part % n_parts == n_parts - 1;
    row_job job = {
        .weights = share->down, .n_columns = round->expert_width, .row_bytes = row_bytes,
        .next = !is_last ? share->down + (size_t)end * row_bytes
              : part / n_parts + 1 < round->n_shares ? share[1].down : NULL,
        .input = &round->inner, .first_token = share->first, .n_tokens = share->n,
        .out = round->out, .out_rows = round->out_rows + share->first,
        .out_stride = (size_t)round->width,
    };
    round->down->multiply[round->numerics](&job, &round->engine->grids, begin, end);
}

/* Both phases for the pairs collected so far, and the round is empty again. */
static void run_round(experts_round *round)
{
    int most = 1;
    for (int i = 0; i < round->n_shares; i++)
        most = round->shares[i].n > most ? round->shares[i].n : most;
    most = smaller(most, TOKENS_AT_ONCE);
    round->gate_rows = smaller(GATE_VALUES / most / GROUP * GROUP, DOWN_ROWS);
    thread_pool *pool = round->engine->pool;
    threads_run(pool, gate_up_part, round,
                round->n_shares * parts_of(round->expert_width, round->gate_rows));
    threads_run(pool, down_part, round, round->n_shares * parts_of(round->width, DOWN_ROWS));
    round->n_shares = round->n_pairs = 0;
}

/* Groups beyond the expert's width, up to a whole tile, are zero in all rounds. */
static void clear_padding(activations *inner, int n_pairs, int expert_width)
{
    int first = (expert_width + GROUP - 1) / GROUP;
    size_t n_groups = (size_t)inner->n_groups, planes = (size_t)inner->planes;
    for (size_t pair = 0; pair < (size_t)n_pairs; pair++)
        for (size_t g = (size_t)first; g < n_groups; g++) {
            size_t at = pair * n_groups + g;
            memset(inner->values + GROUP * at, 0, GROUP * sizeof(float));
            for (size_t p = 0; p < planes; p++)
                memset(inner->bytes + GROUP * ((pair * planes + p) * n_groups + g), 0, GROUP);
            inner->scales[at] = 0.0f;
            inner->sums[at] = (group_sums){0};
        }
}

static void add_pairs(experts_round *round, const uint64_t *addresses, const int32_t *pairs, int n,
                      int n_active)
{
    while (n > 0) {
        int taken = smaller(n, ROUND_PAIRS - round->n_pairs);
        if (taken < n && round->n_pairs > 0) { /* split an expert only where it must be */
            run_round(round);
            continue;
        }
        round->shares[round->n_shares++] = (expert_share){
            (const uint8_t *)(uintptr_t)addresses[0], (const uint8_t *)(uintptr_t)addresses[1],
            (const uint8_t *)(uintptr_t)addresses[2], round->n_pairs, taken};
        for (int i = 0; i < taken; i++) {
            round->tokens[round->n_pairs + i] = pairs[i] / n_active;
            round->out_rows[round->n_pairs + i] = pairs[i];
        }
        round->n_pairs += taken;
        pairs += taken;
        n -= taken;
    }
}

int moe_expert_blocks(moe_engine *engine, int numerics, int gate_type, int up_type, int down_type,
                      int width, int expert_width, const uint64_t *addresses, int n_experts,
                      const int32_t *pairs, const int32_t *pair_counts, int n_active,
                      const float *x, int n_tokens, float *out)
{
    const type_kernels *types = engine->set->types;
    experts_round round = {
        .engine = engine, .numerics = numerics, .width = width, .expert_width = expert_width,
        .gate = types + gate_type, .up = types + up_type, .down = types + down_type, .out = out,
    };
    int n_inner = smaller(ROUND_PAIRS, n_tokens * n_active);
    int planes = planes_for(round.gate, numerics), up_planes = planes_for(round.up, numerics);
    int inner_planes = planes_for(round.down, numerics);
    planes = planes > up_planes ? planes : up_planes;
    void *scratch = engine_scratch(engine, activation_bytes(n_tokens, width, planes) +
                                               activation_bytes(n_inner, expert_width, inner_planes));
    if (!scratch)
        return -1;
    carve_activations(&round.input, &scratch, n_tokens, width, planes);
    carve_activations(&round.inner, &scratch, n_inner, expert_width, inner_planes);
    clear_padding(&round.inner, n_inner, expert_width);
    take_activations(engine, &round.input, x, n_tokens, width);
    for (int i = 0; i < n_experts; i++) {
        add_pairs(&round, addresses + 3 * i, pairs, pair_counts[i], n_active);
        pairs += pair_counts[i];
    }
    if (round.n_pairs)
        run_round(&round);
    return 0;
}
