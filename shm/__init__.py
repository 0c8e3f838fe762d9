"""What the processes must agree on: the bytes of the slab pool, the messages, how a child is born."""
