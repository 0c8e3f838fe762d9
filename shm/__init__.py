"""What the processes must agree on: bytes of the slab pool, messages, how a child is born."""
