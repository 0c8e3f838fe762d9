"""Writes importance matrices as llama.cpp does, for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

WIDTH = 8


def write_imatrix(path: Path, counts: Mapping[str, Sequence[float]]) -> Path:
    """Sums and counts of each weight; the counts are those given."""
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in counts.items():
        writer.add_tensor(f"{name}.in_sum2", np.ones((len(values), WIDTH), np.float32))
        writer.add_tensor(f"{name}.counts", np.array(values, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
