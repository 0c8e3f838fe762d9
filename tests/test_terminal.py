"""What goes where, and what a reader that went away or has no room means."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import shm
from coordinator.command.streams import write_output
from coordinator.command.terminal import Terminal, TextOutput


def test_lines_go_to_standard_error_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    text = "[bold]pool[/] " + "x" * 300
    with Terminal() as terminal:
        terminal.line(text)
        terminal.warning("small")
    found = capfd.readouterr()
    assert found.out == ""
    assert found.err == f"{text}\nwarning: small\n"


def test_quiet_keeps_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with Terminal(quiet=True) as terminal:
        terminal.line("kernels: numpy")
        terminal.progress("dense", 1, 2)
        terminal.warning("small")
    assert capfd.readouterr().err == "warning: small\n"


def test_progress_without_a_terminal_is_a_line_a_second(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Terminal() as terminal:
        for done in range(1, 31):
            now += 0.1
            terminal.progress("dense", done, 30)
        terminal.progress("nothing to do", 0, 0)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2  # a short phase says nothing, a finished one neither
    assert [line.partition(":")[0] for line in lines] == ["dense", "dense"]
    assert 30 <= int(lines[0].split()[1]) <= 40


def test_a_late_phase_that_is_short_says_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Terminal() as terminal:
        for start in (100.0, 105.0, 110.0):
            for done in range(1, 4):
                now = start + 0.3 * done
                terminal.progress("dense", done, 3)
    assert capfd.readouterr().err == ""


def test_a_bar_goes_when_its_phase_is_done() -> None:
    """In a service whose compute process starts again, nothing else would end it."""
    leader, follower = pty.openpty()
    program = (
        "import threading; from coordinator.command.terminal import Terminal\n"
        "with Terminal() as terminal:\n"
        "    terminal.progress('dense', 1, 2); terminal.progress('experts', 1, 2)\n"
        "    terminal.progress('dense', 2, 2); assert threading.active_count() > 1\n"
        "    terminal.progress('experts', 2, 2)\n"
        "    others = threading.enumerate()[1:]; [thread.join(5) for thread in others]\n"
        "    assert threading.active_count() == 1, others\n"
    )
    options = {"stderr": follower, "env": {**environment(), "TERM": "xterm"}}
    done = subprocess.run([sys.executable, "-c", program], check=False, **options)  # type: ignore[call-overload]
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.returncode == 0, shown
    assert "experts" in shown


def environment() -> dict[str, str]:
    """For a program that imports ours."""
    return {**os.environ, "PYTHONPATH": str(Path(shm.__file__).parent.parent)}


def test_text_goes_to_standard_output_at_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    out = TextOutput()
    out.write("héllo")
    out.write("")
    assert capfdbinary.readouterr().out == "héllo".encode()
    assert not out.is_closed


def run(program: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", program],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,
    )


def test_a_reader_that_went_away_is_remembered() -> None:
    read, write = os.pipe()
    os.close(read)
    program = (
        "import sys; from coordinator.command.terminal import TextOutput\n"
        "from coordinator.command.streams import let_output_go\n"
        "out = TextOutput(); out.write('a'); out.write('b')\n"
        "let_output_go()\n"
        "sys.exit(9 if out.is_closed else 1)"
    )
    done = run(program, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (9, "")


def test_who_read_the_lines_may_go() -> None:
    """A service must not end because the terminal it was started from is closed."""
    program = (
        "from coordinator.command.streams import write_output\n"
        "from coordinator.command.terminal import Terminal\n"
        "with Terminal() as terminal:\n"
        "    for _ in range(1000):\n"
        "        terminal.line('x' * 100); terminal.warning('y'); terminal.progress('z', 1, 2)\n"
        "    write_output('goes on')\n"
    )
    leader, follower = pty.openpty()
    read, write = os.pipe()
    os.close(leader)
    os.close(read)
    with Path("/dev/full").open("w") as full:
        for gone in (follower, write, full.fileno()):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=gone,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, b"goes on")
    os.close(follower)
    os.close(write)


def test_an_error_that_nobody_hears_keeps_its_exit_code() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "coordinator", "--no-such-flag"]
    done = subprocess.run(command, env=environment(), stderr=write, check=False)
    os.close(write)
    assert done.returncode == 2


def test_no_room_is_an_error_with_a_name() -> None:
    program = (
        "from coordinator.command.streams import OutputError, write_output\n"
        "try:\n    write_output('x')\nexcept OutputError as error:\n"
        "    import sys; print(error, file=sys.stderr)"
    )
    with Path("/dev/full").open("w") as full:
        done = run(program, stdout=full)
    assert done.stderr.splitlines()[0].startswith(
        "standard output: cannot write: No space left on device"
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_opened(closed: tuple[int, ...], tmp_path: Path) -> None:
    """What is opened next must not get the number of one of them."""
    program = (
        "import os, sys; from coordinator.command.streams import open_missing_streams\n"
        "open_missing_streams()\n"
        "fd = os.open('/dev/zero', os.O_RDONLY)\n"
        "assert fd > 2 and None not in (sys.stdin, sys.stdout, sys.stderr)\n"
        "assert all(os.get_inheritable(number) for number in range(3))\n"
        "print('to nobody'); print('to nobody', file=sys.stderr); sys.stdin.read()\n"
        "sys.stdout.flush()\n"
        f"open({str(tmp_path / 'ok')!r}, 'w').close()"
    )
    closing = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closing}', sys.executable, program],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ok").exists()


def test_write_output_replaces_what_is_no_text(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_output("a\udcffb")
    assert capfdbinary.readouterr().out == b"a?b"
