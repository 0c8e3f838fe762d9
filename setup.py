"""What pyproject.toml cannot say: the C extension is built by cffi, and uses Python's stable interface,
so that one wheel fits all versions."""

from setuptools import setup

setup(
    cffi_modules=["compute_worker/native/build_native.py:builder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
