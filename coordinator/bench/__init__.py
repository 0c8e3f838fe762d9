"""The laboratory: this program and others measured against each other, and the machine alone.

It owns comparisons in paired blocks (`bench`), what the machine allows (`ceiling`), and any command
under limits (`capped`). Whatever is measured runs as a process of its own and is judged from
outside: it knows nothing of the inside of a run. `coordinator.bench_ray` brings a comparison to
every node of a cluster.
"""
