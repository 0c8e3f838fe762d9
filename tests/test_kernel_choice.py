"""The choice of a provider, and what every provider must offer."""

import numpy as np
import pytest

from compute_worker.kernel_choice import BUILDERS, select
from compute_worker.kernels import KernelError
from compute_worker.matrix import Matrix


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_numpy_is_always_there(numerics: str) -> None:
    kernels = select("numpy", numerics, 1)
    assert kernels.name == "numpy"
    weights = np.eye(3, dtype=np.float32)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (kernels.matmul(Matrix(weights.view(np.uint8).ravel(), 0, 3, 3), x) == x).all()
    kernels.park()
    kernels.close()


def test_an_unknown_provider_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"expected one of .*numpy.*, found cuda") as caught:
        select("cuda", "exact", 1)
    assert all(name in str(caught.value) for name in BUILDERS)
