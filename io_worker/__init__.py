"""File format, slab ranges and readers: the only package that moves slabs. Never imports numpy."""
