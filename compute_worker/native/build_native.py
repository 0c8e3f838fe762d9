"""Builds the extension `compute_worker.native._kernels` with cffi; setuptools calls it at install.

pyproject.toml names the sources and flags; what it cannot say is here: cffi writes one of the
sources from the declarations in `api.h`, between its two marks. The binary uses the stable
interface of Python (abi3) and no instruction beyond the base of its architecture outside the
functions that are chosen at run time, so it runs on any machine of that architecture.

The extension is optional: without a compiler the install goes on with a message, and the engine
runs on the numpy references.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cffi
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
MODULE = "compute_worker.native._kernels"


class BuildKernels(build_ext):  # type: ignore[misc]  # setuptools has no types
    """setuptools' command, with the one source that cffi writes, and a compiler on every core."""

    def build_extensions(self) -> None:
        """Write the source, then compile all of them."""
        ffi = cffi.FFI()
        ffi.cdef(declarations())
        ffi.set_source(MODULE, '#include "api.h"')
        ffi.emit_c_code(str(HERE / "_kernels.c"))
        compile_some = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            # setuptools compiles the sources of one extension one after the other
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_some([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_all
        super().build_extensions()


def declarations() -> str:
    """The part of api.h that cffi understands."""
    text = (HERE / "api.h").read_text(encoding="utf-8")
    return text.split("/* cffi begins */")[1].split("/* cffi ends */")[0]
