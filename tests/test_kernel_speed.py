"""The command that measures the kernels."""

import pytest

from compute_worker import kernel_speed
from compute_worker.native_kernels import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no native kernels")


def test_every_memory_and_thread_count_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--types", "Q4_K", "IQ4_XS", "--threads", "1", "2", "--bytes", str(1 << 20)]
    assert kernel_speed.main([*options, "--tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 token(s)" in lines[0]
    starts = [line.split("  ")[0] for line in lines[1:]]
    assert starts.count("memfd 4 KiB 1 thread(s)") == starts.count("memfd 4 KiB 2 thread(s)") == 3
    assert [line for line in lines if "Q4_K" in line and "of the bus" in line]
    assert len(lines) == 1 + 2 * 2 * 3


def test_all_types_with_a_kernel_are_measured_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kernel_speed.main(["--threads", "1", "--bytes", str(1 << 18)]) == 0
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in ("F32", "BF16", "Q5_1", "Q6_K", "IQ3_S", "MXFP4"))
