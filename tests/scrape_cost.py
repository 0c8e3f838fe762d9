"""What a scrape costs: processor time of the coordinator over many scrapes of a run that idles.

    python tests/scrape_cost.py                200 scrapes of the shipped model's run
    python tests/scrape_cost.py --model FILE --io-workers 8

Every scrape finds its page too old and has it made anew. What the coordinator uses without scrapes,
measured before, is taken off. Ends with 1 if a scrape costs more than 5 ms.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HOST = "127.0.0.1"
MAX_SCRAPE_SECONDS = 0.005
KEPT_SECONDS = 0.26  # a page is kept for 0.25 s
IDLE_SECONDS = 5.0


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scrapes", type=int, default=200)
    own, flags = parser.parse_known_args()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-P", "-m", "coordinator", "--metrics-port", str(port), *flags]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).startswith("ready;"):
                if not line:
                    return process.wait()
            return report(process.pid, port, own.scrapes)
        finally:
            process.terminate()


def report(pid: int, port: int, n_scrapes: int) -> int:
    """Measure, print, judge."""
    paths = [item["labels"]["__metrics_path__"] for item in json.loads(get(port, "/targets"))]
    before = cpu_seconds(pid)
    time.sleep(IDLE_SECONDS)
    idle_share = (cpu_seconds(pid) - before) / IDLE_SECONDS

    before, started = cpu_seconds(pid), time.monotonic()
    n_bytes = 0
    for number in range(n_scrapes):
        n_bytes += len(get(port, paths[number % len(paths)]))
        if number % len(paths) == len(paths) - 1:
            time.sleep(KEPT_SECONDS)
    wall_seconds = time.monotonic() - started
    used = cpu_seconds(pid) - before - idle_share * wall_seconds
    print(
        f"{n_scrapes} scrapes of {len(paths)} processes on {os.cpu_count()} cores: "
        f"{1e3 * used / n_scrapes:.2f} ms CPU per scrape, {n_bytes / n_scrapes / 1024:.1f} KiB; "
        f"without scrapes {1e3 * idle_share:.2f} ms per second"
    )
    return int(used / n_scrapes > MAX_SCRAPE_SECONDS)


def get(port: int, path: str) -> bytes:
    """The body of a page."""
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10) as answer:
        body: bytes = answer.read()
        return body


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process: first field of proc(5) `schedstat`."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
