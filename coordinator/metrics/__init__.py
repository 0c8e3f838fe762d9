"""What Prometheus scrapes of a run.

It owns the series, each declared once, and serving their pages. It reads plain state of the run
when asked, changes nothing, and counts nothing on the way of a token.
"""
