/* A tile: LANES rows × 256 columns of weights, unpacked side by side. Included once per set.
 *
 *     words[k / 4]   lane r: columns k .. k+3 of row r, one byte each, as weight + offset (unsigned)
 *     scale[s]       lane r: scale of subgroup s of row r, minimum[s] likewise
 *
 *     weight = scale * (byte - offset) + minimum
 *
 * A subgroup is 32 columns, or 16 where a type has twice as many scales. Float types have no scales:
 * their tile is 64 columns, and words[k] is column k as float32.
 */
typedef struct {
    vu words[TILE_COLUMNS / 4];
    vf scale[TILE_COLUMNS / 16];
    vf minimum[TILE_COLUMNS / 16];
} tile;

enum { FLOAT_TILE_COLUMNS = 64 };

/* What the multiplication must know of a type; constants to the compiler. */
typedef struct {
    int offset;     /* of the bytes, so that they are unsigned */
    int wide;       /* bytes go beyond 127 */
    int subgroups;  /* per 32 columns: 1 or 2 */
    int has_minimum;
    int is_float;
} layout;
