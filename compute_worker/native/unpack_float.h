/* F32, F16, BF16: rows of plain numbers, columns in order. */

static const layout layout_f32 = {.is_float = 1};
static const layout layout_f16 = {.is_float = 1};
static const layout layout_bf16 = {.is_float = 1};

INLINE void unpack_f32(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    UNROLL for (int i = 0; i < FLOAT_TILE_COLUMNS / LANES; i++) {
        vu words[LANES];
        take_lines(t, rows, 4 * LANES * i, words);
        UNROLL for (int j = 0; j < LANES; j++)
            put_float(t, how, LANES * i + j, (vf)words[j]);
    }
    finish_floats(t, how);
}

INLINE void unpack_f16(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    UNROLL for (int i = 0; i < FLOAT_TILE_COLUMNS / 2 / LANES; i++) {
        vu pairs[LANES];
        take_lines(t, rows, 4 * LANES * i, pairs);
        UNROLL for (int j = 0; j < LANES; j++) {
            put_float(t, how, 2 * (LANES * i + j), half_to_float(pairs[j]));
            put_float(t, how, 2 * (LANES * i + j) + 1, half_to_float(pairs[j] >> 16));
        }
    }
    finish_floats(t, how);
}

/* A bfloat16 is the upper half of a float32. */
INLINE void unpack_bf16(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    UNROLL for (int i = 0; i < FLOAT_TILE_COLUMNS / 2 / LANES; i++) {
        vu pairs[LANES];
        take_lines(t, rows, 4 * LANES * i, pairs);
        UNROLL for (int j = 0; j < LANES; j++) {
            put_float(t, how, 2 * (LANES * i + j), (vf)(pairs[j] << 16));
            put_float(t, how, 2 * (LANES * i + j) + 1, (vf)(pairs[j] & 0xffff0000u));
        }
    }
    finish_floats(t, how);
}
