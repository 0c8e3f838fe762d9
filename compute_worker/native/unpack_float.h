/* F32, F16, BF16: rows of plain numbers, columns in order. */

static const layout layout_f32 = {.is_float = 1};
static const layout layout_f16 = {.is_float = 1};
static const layout layout_bf16 = {.is_float = 1};

INLINE void unpack_f32(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int i = 0; i < FLOAT_TILE_COLUMNS / 4; i++)
        load_columns(p + 16 * i, stride, t->words + 4 * i);
}

INLINE void unpack_f16(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int i = 0; i < FLOAT_TILE_COLUMNS / 8; i++) {
        vu pairs[4];
        load_columns(p + 16 * i, stride, pairs);
        for (int j = 0; j < 4; j++) {
            t->words[8 * i + 2 * j] = (vu)half_to_float(pairs[j]);
            t->words[8 * i + 2 * j + 1] = (vu)half_to_float(pairs[j] >> 16);
        }
    }
}

/* A bfloat16 is the upper half of a float32. */
INLINE void unpack_bf16(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int i = 0; i < FLOAT_TILE_COLUMNS / 8; i++) {
        vu pairs[4];
        load_columns(p + 16 * i, stride, pairs);
        for (int j = 0; j < 4; j++) {
            t->words[8 * i + 2 * j] = pairs[j] << 16;
            t->words[8 * i + 2 * j + 1] = pairs[j] & 0xffff0000u;
        }
    }
}
