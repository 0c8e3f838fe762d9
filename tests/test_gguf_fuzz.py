"""The header reader against mutated files, and the fuzzer against a reader with planted faults."""

import inspect
import os
import random
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gguf_fuzz import fuzz, mutant, seeds

from io_worker import gguf_header, gguf_metadata, model_bytes
from io_worker.gguf_header import GgufHeader, ModelFormatError, read_header

N_MUTANTS = 20_000
MEBIBYTE = 1 << 20


@pytest.fixture
def memory_file() -> Iterator[Path]:
    """A file in memory: on a disk the writes would take most of the time."""
    descriptor = os.memfd_create("mutant")
    yield Path(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def test_seeds_are_good_files(memory_file: Path) -> None:
    for seed in seeds():
        memory_file.write_bytes(seed.content)
        assert len(read_header(memory_file).tensors) == 3


def test_mutants_are_repeatable_and_differ() -> None:
    def run(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [mutant(seeds(), rng) for _ in range(200)]

    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) > 180


def test_every_mutant_is_read_or_refused(memory_file: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally = fuzz(read_header, memory_file, seeds(), n_mutants=N_MUTANTS, seed=20_240_501)
    assert tally.findings == []
    assert tally.n_refused + tally.n_accepted == N_MUTANTS
    # Both paths must be taken often, or the mutations have gone stale.
    assert tally.n_accepted > N_MUTANTS // 20 and tally.n_refused > N_MUTANTS // 4
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown_bytes < 64 * MEBIBYTE


MODULES = {"model_bytes": model_bytes, "gguf_metadata": gguf_metadata, "gguf_header": gguf_header}


def faulty_reader(
    monkeypatch: pytest.MonkeyPatch, faulty: str, right: str, wrong: str
) -> Callable[[Path], GgufHeader]:
    """The real reader with one place of the source of module `faulty` made wrong."""
    for name, module in MODULES.items():
        source = inspect.getsource(module)
        if name == faulty:
            assert source.count(right) == 1, right
            source = source.replace(right, wrong)
        for other in MODULES:
            source = source.replace(f"from io_worker.{other} import", f"from faulty_{other} import")
        copy = types.ModuleType(f"faulty_{name}")
        monkeypatch.setitem(sys.modules, copy.__name__, copy)
        exec(compile(source, copy.__name__, "exec"), copy.__dict__)
        copy.__dict__["ModelFormatError"] = ModelFormatError  # so that a refusal is one
    reader: Callable[[Path], GgufHeader] = sys.modules["faulty_gguf_header"].read_header
    return reader


PLANTED: dict[str, tuple[str, str, str, str]] = {
    # the module, its right place, the fault, what the fuzzer must say
    "no-overlap-check": (
        "gguf_header",
        "if before.offset + before.n_bytes > after.offset:",
        "if False:",
        "overlaps",
    ),
    "no-end-check": (
        "gguf_header",
        "if stop > cursor.file_bytes:",
        "if False:",
        "does not lie in the file",
    ),
    "dimension-0": ("gguf_header", "if not 1 <= size", "if not 0 <= size", "not lie in the file"),
    "no-offset-check": ("gguf_header", "if offset % alignment:", "if False:", "is not aligned"),
    "row-error-leaks": ("gguf_header", "except ValueError", "except KeyError", "ValueError"),
    "utf8-error-leaks": (
        "model_bytes",
        "except UnicodeDecodeError",
        "except KeyError",
        "UnicodeDecodeError",
    ),
    "raw-names": (
        "model_bytes",
        "if not text or not text.isprintable():",
        "if not text:",
        "is not printable",
    ),
    "no-alignment-check": (
        "gguf_metadata",
        "if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):",
        "if False:",
        "",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(
    memory_file: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    faulty, right, wrong, fault = PLANTED[case]
    reader = faulty_reader(monkeypatch, faulty, right, wrong)
    tally = fuzz(
        reader,
        memory_file,
        seeds(),
        n_mutants=N_MUTANTS,
        seed=20_240_501,
        stop_at_first=True,
    )
    assert [finding.fault for finding in tally.findings if fault in finding.fault]


def test_a_slow_reader_is_found(memory_file: Path) -> None:
    def slow(path: Path) -> GgufHeader:
        header = read_header(path)
        stop = time.process_time() + 0.02
        while time.process_time() < stop:
            pass
        return header

    tally = fuzz(
        slow,
        memory_file,
        seeds(),
        n_mutants=1000,
        seed=1,
        limit_seconds=0.01,
        stop_at_first=True,
    )
    assert "took longer" in tally.findings[0].fault


def test_an_unchanged_copy_of_the_reader_has_no_fault(
    memory_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the planted faults above are found for what they are."""
    reader = faulty_reader(monkeypatch, "", "", "")
    tally = fuzz(reader, memory_file, seeds(), n_mutants=1000, seed=20_240_501)
    assert tally.findings == []
