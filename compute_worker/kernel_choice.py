"""Chooses who provides the kernels. A provider is a row of `BUILDERS`."""

import dataclasses
from collections.abc import Callable, Mapping

from compute_worker import dense_layer, native_kernels, reference
from compute_worker.kernels import KernelError, Kernels
from compute_worker.known_layers import known_layers

AUTO = "auto"


def _numpy(numerics: str, n_threads: int) -> Kernels:
    """The references. They know one numerics (exact) and one thread whatever was asked for."""
    return Kernels(
        name="numpy",
        matmul=reference.matmul,
        matmuls=reference.matmuls,
        rms_norm=reference.rms_norm,
        rotate=reference.rotate,
        top_experts=reference.top_experts,
        combine=reference.combine,
        expert_blocks=reference.expert_blocks,
        attention=reference.attention,
        store_kv=reference.store_kv,
        attend=dense_layer.attend,
        choose=dense_layer.choose,
        known_layers=known_layers,
        read_all=reference.read_all,
        park=_nothing,
        close=_nothing,
    )


def _nothing() -> None:
    """No threads to park or end."""


BUILDERS: Mapping[str, Callable[[str, int], Kernels]] = {
    "native": native_kernels.build,
    "numpy": _numpy,
}


def select(kind: str, numerics: str, n_threads: int) -> Kernels:
    """Build the kernels of one provider.

    `kind` is a key of `BUILDERS` or "auto" (native where the install could build it), `numerics` is
    "exact" or "fast". Raises `KernelError`.
    """
    if kind == AUTO:
        reason = native_kernels.unavailable_reason()
        if reason is None:
            return BUILDERS["native"](numerics, n_threads)
        numpy = BUILDERS["numpy"](numerics, n_threads)
        return dataclasses.replace(numpy, name=f"numpy ({reason}; some 40 times slower)")
    build = BUILDERS.get(kind)
    if build is None:
        known = ", ".join((AUTO, *BUILDERS))
        raise KernelError(f"kernels: expected one of {known}, found {kind}; use --kernels numpy")
    return build(numerics, n_threads)
