"""Architectures, forward pass, kernels and sampling. Knows token ids, never text."""
