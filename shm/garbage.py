"""When Python looks for garbage in cycles: seldom, and never among what was there before.

These processes answer messages for as long as they live, and what they drop holds no cycles.
Python's own count has it look every 700 objects, twice per token in the coordinator, for 200 us
each on caches that the kernels have just swept, while compute waits.
"""

import gc

OBJECTS_BETWEEN_LOOKS = 50_000  # more than a token makes; 10 MiB if all of them were garbage


def look_seldom() -> None:
    """From now on, in this process."""
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_LOOKS)
