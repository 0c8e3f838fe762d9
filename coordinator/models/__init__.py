"""Model files as files: found by name, mapped, packed, verified, made up.

It owns what is written to the disk of a model, so that no end of the program leaves half of it. It
runs no model; `io_worker` knows the format.
"""
