/* The feed-forward blocks of a layer's experts, a round of several experts at a time.
 *
 *     phase 0   the tokens of experts with several of them are laid side by side
 *     phase 1   a part: some rows of gate and up of one expert: inner = silu(gate x) * (up x); each
 *               group of 32 values is prepared at once as activations of phase 2
 *     phase 2   a part: some rows of down of one expert, written to the rows of its pairs
 *
 * A round holds experts with ROUND_PAIRS pairs together, so that the inner activations stay in the
 * cache; an expert with more pairs than that goes in several rounds, each unpacking its weights.
 */
#include <string.h>

#include "engine.h"
#include "threads.h"

enum {
    ROUND_PAIRS = 512,  /* a multiple of SIDE_BY_SIDE */
    /* Rows of a part of phase 2, at most of one of phase 1: 10 to 20 us. Twice as many leave a
     * thread idle for longer at the end of a phase: 3 % of a token's time. */
    DOWN_ROWS = 64,
    GATE_VALUES = 4096, /* rows × tokens of a part of phase 1: gate and up lie on the stack */
};

/* Some pairs of one expert. A lone pair uses the activations of its token where they are; several
 * use a copy that begins a bundle. `…_first` counts in input and inner, `pair` in the round. */
typedef struct {
    const uint8_t *gate, *up, *down;
    int pair, n;
    const activations *input;
    activations *inner;
    int input_first, inner_first;
} expert_share;

typedef struct {
    moe_engine *engine;
    int numerics, width, expert_width, gate_rows;
    const type_kernels *gate, *up, *down;
    activations input;                       /* all tokens */
    activations bundled;                     /* of the shares with several pairs */
    activations lone_inner, bundled_inner;   /* (ROUND_PAIRS) each */
    int n_shares, n_pairs, n_lone, n_bundled; /* n_bundled counts whole bundles' tokens */
    expert_share shares[ROUND_PAIRS];
    int32_t tokens[ROUND_PAIRS], out_rows[ROUND_PAIRS]; /* by pair */
    float *out;
} experts_round;

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

static int parts_of(int n_rows, int rows_per_part)
{
    return (n_rows + rows_per_part - 1) / rows_per_part;
}

static void bundle_part(void *context, int part)
{
    experts_round *round = context;
    const expert_share *share = round->shares + part;
    if (share->input == &round->bundled)
        for (int i = 0; i < share->n; i += SIDE_BY_SIDE)
            bundle_tokens(&round->input, round->tokens + share->pair + i,
                          smaller(SIDE_BY_SIDE, share->n - i), &round->bundled,
                          (share->input_first + i) / SIDE_BY_SIDE);
}

/* Rows [begin, end) of gate or up times pairs [first, first + n) of the share. */
static void multiply_inner(const experts_round *round, const expert_share *share,
                           const type_kernels *type, const uint8_t *weights, const uint8_t *next,
                           int begin, int end, int first, int n, float *out)
{
    row_job job = {
        .weights = weights, .next = next, .n_columns = round->width,
        .row_bytes = row_bytes_of(type, round->width), .input = share->input,
        .first_token = share->input_first + first, .n_tokens = n, .out = out,
        .out_stride = (size_t)round->gate_rows, .out_begin = begin,
    };
    type->multiply[planes_for(type, round->numerics, 1)](&job, &round->engine->grids, begin, end);
}

static void gate_up_part(void *context, int part)
{
    experts_round *round = context;
    const instruction_set *set = round->engine->set;
    int n_parts = parts_of(round->expert_width, round->gate_rows);
    const expert_share *share = round->shares + part / n_parts;
    int begin = part % n_parts * round->gate_rows;
    int end = smaller(begin + round->gate_rows, round->expert_width);
    int at_once = GATE_VALUES / round->gate_rows, stride = round->gate_rows;
    size_t up_begin = (size_t)begin * row_bytes_of(round->up, round->width);
    size_t gate_end = (size_t)end * row_bytes_of(round->gate, round->width);
    const uint8_t *next = part % n_parts < n_parts - 1 ? share->gate + gate_end
                        : part / n_parts + 1 < round->n_shares ? share[1].gate : NULL;
    float gate[GATE_VALUES], up[GATE_VALUES];
    if ((end - begin) % GROUP) { /* the last group is filled up with zeros */
        memset(gate, 0, sizeof gate);
        memset(up, 0, sizeof up);
    }
    for (int first = 0; first < share->n; first += at_once) {
        int n = smaller(at_once, share->n - first);
        multiply_inner(round, share, round->gate, share->gate, share->up + up_begin, begin, end,
                       first, n, gate);
        multiply_inner(round, share, round->up, share->up, next, begin, end, first, n, up);
        for (int i = 0; i < n; i++)
            for (int row = 0; row < end - begin; row += GROUP) {
                float inner[GROUP];
                set->silu_product(gate + i * stride + row, up + i * stride + row, inner, GROUP);
                set->prepare(share->inner, share->inner_first + first + i, (begin + row) / GROUP, 1,
                             inner);
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
        .input = share->inner, .first_token = share->inner_first, .n_tokens = share->n,
        .out = round->out, .out_rows = round->out_rows + share->pair,
        .out_stride = (size_t)round->width,
    };
    round->down->multiply[round->lone_inner.planes](&job, &round->engine->grids, begin, end);
}

/* All phases for the pairs collected so far, and the round is empty again. */
static void run_round(experts_round *round)
{
    thread_pool *pool = round->engine->pool;
    int most = 1;
    for (int i = 0; i < round->n_shares; i++)
        most = larger(round->shares[i].n, most);
    most = smaller(most, TOKENS_AT_ONCE);
    round->gate_rows = smaller(GATE_VALUES / most / GROUP * GROUP, DOWN_ROWS);
    if (round->n_bundled)
        threads_run(pool, bundle_part, round, round->n_shares);
    threads_run(pool, gate_up_part, round,
                round->n_shares * parts_of(round->expert_width, round->gate_rows));
    threads_run(pool, down_part, round, round->n_shares * parts_of(round->width, DOWN_ROWS));
    round->n_shares = round->n_pairs = round->n_lone = round->n_bundled = 0;
}

static void add_share(experts_round *round, const uint64_t *addresses, const int32_t *pairs, int n,
                      int n_active)
{
    expert_share *share = round->shares + round->n_shares++;
    *share = (expert_share){
        .gate = (const uint8_t *)(uintptr_t)addresses[0],
        .up = (const uint8_t *)(uintptr_t)addresses[1],
        .down = (const uint8_t *)(uintptr_t)addresses[2],
        .pair = round->n_pairs, .n = n,
    };
    for (int i = 0; i < n; i++) {
        round->tokens[round->n_pairs + i] = pairs[i] / n_active;
        round->out_rows[round->n_pairs + i] = pairs[i];
    }
    if (n == 1 && round->engine->set->has_direct) {
        share->input = &round->input;
        share->input_first = pairs[0] / n_active;
        share->inner = &round->lone_inner;
        share->inner_first = round->n_lone++;
    } else {
        share->input = &round->bundled;
        share->inner = &round->bundled_inner;
        share->input_first = share->inner_first = round->n_bundled;
        round->n_bundled += parts_of(n, SIDE_BY_SIDE) * SIDE_BY_SIDE;
    }
    round->n_pairs += n;
}

static void add_pairs(experts_round *round, const uint64_t *addresses, const int32_t *pairs, int n,
                      int n_active)
{
    while (n > 0) {
        int taken = smaller(n, ROUND_PAIRS);
        int bundled = parts_of(taken, SIDE_BY_SIDE) * SIDE_BY_SIDE;
        if (round->n_bundled + bundled > ROUND_PAIRS || round->n_pairs + taken > ROUND_PAIRS)
            run_round(round);
        add_share(round, addresses, pairs, taken, n_active);
        pairs += taken;
        n -= taken;
    }
}

/* Groups beyond the expert's width, up to a whole tile, are zero in all rounds. */
static void clear_padding(const instruction_set *set, activations *inner, int n_tokens,
                          int expert_width)
{
    static const float zeros[GROUP];
    int begin = parts_of(expert_width, GROUP), end = used_groups(expert_width, inner->planes);
    for (int i = 0; i < n_tokens; i++)
        for (int g = begin; g < end; g++)
            set->prepare(inner, i, g, 1, zeros);
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
    activation_shape input = {
        .n_tokens = n_tokens, .n_columns = width, .width = 1,
        .planes = larger(planes_for(round.gate, numerics, 1), planes_for(round.up, numerics, 1)),
        .has_values = round.gate->is_float || round.up->is_float,
    };
    int n_pairs = 0;
    for (int i = 0; i < n_experts; i++)
        n_pairs += pair_counts[i];
    activation_shape lone = {
        .n_tokens = smaller(n_pairs, ROUND_PAIRS), .n_columns = expert_width, .width = 1,
        .planes = planes_for(round.down, numerics, 1), .has_values = round.down->is_float,
    };
    activation_shape bundled = input, bundled_inner = lone;
    bundled.n_tokens = bundled_inner.n_tokens =
        n_tokens == 1 && engine->set->has_direct ? 0 : smaller(n_pairs * SIDE_BY_SIDE, ROUND_PAIRS);
    bundled.width = bundled_inner.width = SIDE_BY_SIDE;
    void *scratch = engine_scratch(engine, activation_bytes(input) + activation_bytes(lone) +
                                               activation_bytes(bundled) +
                                               activation_bytes(bundled_inner));
    if (!scratch)
        return -1;
    carve_activations(&round.input, &scratch, input);
    carve_activations(&round.bundled, &scratch, bundled);
    carve_activations(&round.lone_inner, &scratch, lone);
    carve_activations(&round.bundled_inner, &scratch, bundled_inner);
    clear_padding(engine->set, &round.lone_inner, lone.n_tokens, expert_width);
    clear_padding(engine->set, &round.bundled_inner, bundled_inner.n_tokens, expert_width);
    prepare_tokens(engine, &round.input, x, n_tokens, width);
    for (int i = 0; i < n_experts; i++) {
        add_pairs(&round, addresses + 3 * i, pairs, pair_counts[i], n_active);
        pairs += pair_counts[i];
    }
    if (round.n_pairs)
        run_round(&round);
    return 0;
}
