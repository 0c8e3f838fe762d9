"""A service of one's own: started as a child on a free loopback port, and waited for until it is
ready. What it says on standard error is handed on line by line, from a thread of its own."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from coordinator.processes.engine import EngineError
from coordinator.processes.launch import start_own_service, stop_own_service

HOST = "127.0.0.1"
READY = "ready: "
LAST_LINES = 5

Say = Callable[[str, bool], None]  # a line, and whether it is one from before it was ready


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else as long as the `with` lasts: it is bound, and
    not listened on. A service that is told its number, and sets SO_REUSEADDR, may listen on it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def service_process(
    arguments: Sequence[str], say: Say, stop_seconds: float
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Its address, and whether it still runs. It lives as long as the `with`, and as the thread
    that entered it. Raises `EngineError` with its own last line and exit code if it cannot start.
    """
    with reserved_port() as port:
        process = start_own_service([f"--port={port}", "--metrics-port=0", *arguments])
        pipe = process.stderr
        assert pipe is not None
        last, is_ready = deque[str](maxlen=LAST_LINES), threading.Event()
        over = threading.Event()

        def listen() -> None:
            for data in pipe:
                line = data.decode("utf-8", "replace").rstrip("\n")
                last.append(line)
                if line.startswith(READY):
                    is_ready.set()
                    over.set()
                else:
                    say(line, not is_ready.is_set())
            over.set()  # it has ended, ready or not

        listener_thread = threading.Thread(target=listen, name="service", daemon=True)
        listener_thread.start()
        try:
            over.wait()
            if not is_ready.is_set():
                text = last[-1] if last else "it ended without a word"
                raise EngineError(process.wait(), text.removeprefix("moe-coord: error: "))
            yield f"http://{HOST}:{port}", lambda: process.poll() is None
        finally:
            stop_own_service(process, stop_seconds)
            listener_thread.join(stop_seconds)
            pipe.close()
