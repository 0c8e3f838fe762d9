"""For every test: hypothesis draws the same examples in every run, and watches no clock.

A machine that is busy with other things is no error, and what has failed must fail again.
"""

import hypothesis

hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")
