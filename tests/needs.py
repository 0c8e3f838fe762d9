"""Programs that some tests need and a machine may lack: skip there, and name the package.

On the project's continuous integration (`CI=true`) every package is installed (`make ci-deps`), so
there a missing program is a failure, not a skip.
"""

import os
import shutil

import pytest


def needs_program(name: str, *, package: str) -> str:
    """Path of a program of a Debian package."""
    path = shutil.which(name)
    if path is not None:
        return path
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is missing: `make ci-deps` installs the Debian package {package}")
    pytest.skip(f"needs {name} of the Debian package {package}")
