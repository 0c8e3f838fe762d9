"""What the C kernels multiply, for those who load neither them nor numpy."""

import importlib.util

from io_worker.ggml_types import GGML_TYPES

# Weights of other types become float32 a panel at a time (see `reference`). A test compares this
# with what the library says.
NATIVE_TYPES = frozenset(
    kind.id
    for kind in GGML_TYPES.values()
    if kind.name
    in {
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
        "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
        "MXFP4",
    }
)  # fmt: skip


def is_built() -> bool:
    """Whether the install could build them."""
    return importlib.util.find_spec("compute_worker.native._kernels") is not None
