"""The collector of cycles: seldom, and still."""

import gc
from collections.abc import Iterator

import pytest

from shm.garbage import OBJECTS_BETWEEN_LOOKS, look_seldom


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_is_not_looked_at_again_and_the_rest_seldom() -> None:
    look_seldom()
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looks.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept: list[list[int]] = [[] for _ in range(OBJECTS_BETWEEN_LOOKS // 2)]
        assert not looks
        kept += [[] for _ in range(OBJECTS_BETWEEN_LOOKS)]
        assert looks
    finally:
        gc.callbacks.remove(note)
