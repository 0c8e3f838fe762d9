"""Which experts a model used: recorded, counted, replayed.

It owns the files of traces and use counts, what they say of a model, and the hits that any policy
and pool would have had. Replays run the decision core itself. It knows no process and no plan.
"""
