"""The processes of a run and the loop around the core (`engine`).

It owns starting, watching, replacing and ending children, the messages to and from them, and what
the kernel says of processes and memory. Other programs are run and watched here too (`program`).
It decides nothing about experts, and knows neither settings nor how the plan of memory was made.
"""
