from dataclasses import replace

import pytest

from io_worker.probe import READER_NAMES
from io_worker.reader import ModelFile
from io_worker.settings import MAX_QUEUE_DEPTH, IoSettings, decode_settings, encode_settings
from shm.codec import MAX_INTEGER, MessageError, pack

FILES = (
    ModelFile("/m/a.gguf", 5, 6, "", 1, 2, 3, 4),
    ModelFile("/m/b.gguf", 7, None, "O_DIRECT refused at open (why)", 1, MAX_INTEGER, 3, 4),
)
INHERITED = (5, 6, 7)
SETTINGS = IoSettings(FILES, "auto", 2, True)


@pytest.mark.parametrize("reader", READER_NAMES)
@pytest.mark.parametrize("queue_depth", [1, 2, MAX_QUEUE_DEPTH])
@pytest.mark.parametrize("drop_cache", [False, True])
def test_settings_travel(reader: str, queue_depth: int, drop_cache: bool) -> None:
    settings = IoSettings(FILES, reader, queue_depth, drop_cache)
    assert decode_settings(encode_settings(settings), INHERITED) == settings


@pytest.mark.parametrize(
    ("settings", "inherited", "problem"),
    [
        (replace(SETTINGS, reader=""), INHERITED, "expected a reader of auto, direct, buffered"),
        (replace(SETTINGS, reader="Direct"), INHERITED, "expected a reader"),
        (replace(SETTINGS, queue_depth=0), INHERITED, "queue depth"),
        (replace(SETTINGS, queue_depth=MAX_QUEUE_DEPTH + 1), INHERITED, "queue depth"),
        (SETTINGS, (5, 7), r"descriptors \[6\] were not inherited"),
        (SETTINGS, (), r"descriptors \[5, 6, 7\] were not inherited"),
    ],
)
def test_a_bad_figure_is_refused(
    settings: IoSettings, inherited: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_settings(encode_settings(settings), inherited)


def test_other_bytes_are_refused() -> None:
    data = encode_settings(SETTINGS)
    for n_bytes in range(len(data)):
        with pytest.raises(MessageError):
            decode_settings(data[:n_bytes], INHERITED)
    with pytest.raises(MessageError, match="expected IoSettings"):
        decode_settings(pack("Other", SETTINGS), INHERITED)
