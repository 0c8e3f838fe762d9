"""Draws the report of a folder of measurements, in a process of its own: an extra is needed."""
