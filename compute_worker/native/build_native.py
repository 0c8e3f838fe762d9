"""Builds the extension `compute_worker.native._kernels` with cffi; used by setup.py at install.

In a checkout, `python setup.py build_ext --inplace` puts it beside the sources. The binary uses the
stable interface of Python (abi3) and no instruction beyond the base of its architecture outside the
functions that are chosen at run time, so it runs on any machine of that architecture.

cffi reads the declarations from `api.h`, between its two marks.
"""

from pathlib import Path

import cffi  # type: ignore[import-untyped]

HERE = Path(__file__).parent
MODULE = "compute_worker.native._kernels"
SOURCES = (
    "threads",
    "dispatch",
    "engine",
    "matmul",
    "experts",
    "attention",
    "set_portable",
    "set_avx2",
    "set_avx512",
)


def declarations() -> str:
    """The part of api.h that cffi understands."""
    text = (HERE / "api.h").read_text(encoding="utf-8")
    return text.split("/* cffi begins */")[1].split("/* cffi ends */")[0]


def builder() -> cffi.FFI:
    """The description of the extension, for cffi's setuptools hook."""
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    # Paths relative to the folder of setup.py: setuptools refuses absolute ones.
    here = Path("compute_worker/native")
    ffi.set_source(
        MODULE,
        '#include "api.h"',
        sources=[str(here / f"{name}.c") for name in SOURCES],
        depends=[str(path.relative_to(HERE.parent.parent)) for path in sorted(HERE.glob("*.h"))],
        include_dirs=[str(here)],
        # No fused multiply-add where the source does not say so: every path must do the same
        # operations. -Wno-psabi: vectors wider than the base are never passed between files.
        extra_compile_args=[
            "-std=gnu11",
            "-O2",
            "-g0",
            "-ffp-contract=off",
            "-Wno-psabi",
            "-pthread",
        ],
        extra_link_args=["-pthread"],
        optional=True,  # no compiler: the install goes on, and runs on the numpy references
    )
    return ffi
