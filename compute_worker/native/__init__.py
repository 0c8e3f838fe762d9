"""C sources of the kernels, their build script, and (built at install) the extension `_kernels`."""
