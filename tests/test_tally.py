"""What a run adds up, as far as no engine is needed."""

import time

import pytest

from coordinator.serving.tally import Tally


def test_seconds_of_each_token_add_up() -> None:
    tally = Tally(n_prompt=3)
    for pause in (0.02, 0.0, 0.01):
        time.sleep(pause)
        tally.add_token()
    assert len(tally.token_seconds) == tally.n_tokens == 3
    assert tally.token_seconds[0] == tally.prompt_seconds >= 0.02
    assert tally.token_seconds[2] >= 0.01
    assert sum(tally.token_seconds[1:]) == pytest.approx(tally.decode_seconds, abs=1e-6)
