"""Requests in, text out: one from the command line, or many of a service.

It owns the jobs that run on the engine, kept conversations, what is said of a run and shown while
it lasts, and the clients of a service. HTTP itself is `api`'s; what is decided is the core's.
"""
