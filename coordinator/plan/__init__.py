"""From settings, model and machine to everything a run needs (`setup`), before it starts.

It owns the division of memory, what "auto" becomes, the state that the core begins with, and what
speed is to be expected (`moe-coord plan`). It starts no run; what it measures runs in processes of
its own.
"""
