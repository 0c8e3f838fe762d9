"""The service when processes die, clients leave, signals come; and answers beside each other."""

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running_program import wait_until
from running_service import RunningService, events

SHARE_TOKENS = 40
MANY_WAVES = 40
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "stream": True, "seed": 5}
STORY = "And it came to pass in those days, that there went out a decree. " * 12


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """One for all that it survives."""
    with RunningService("--io-workers", "1", "--parallel", "4", "--queue", "64") as run:
        yield run.wait_ready()


def kill(service: RunningService, process: str) -> None:
    os.kill(service.children()[process], signal.SIGKILL)


def is_idle(service: RunningService) -> bool:
    """No request is left, and no KV block but those kept for others, which hold no running one."""
    found = service.status()["requests"]
    return bool(found["running"] == found["queued"] == 0)


def text_of(lines: Iterator[str]) -> str:
    """The text of a stream of a completion."""
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


# Beside each other


def test_answers_do_not_depend_on_who_else_asks(service: RunningService) -> None:
    """Prompts with common beginnings, long and short ones, drawn with a temperature."""
    rng = random.Random(1)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": STORY[: rng.choice([3, 200, 400, 700])] + f"number {n % 5}",
            "max_tokens": rng.randint(5, 30),
            "seed": n,
            "temperature": rng.choice([0.0, 0.9]),
            "logprobs": 2,
        }
        for n in range(12)
    ]
    together = [None] * len(bodies)
    with ThreadPoolExecutor(len(bodies)) as clients:
        together = list(clients.map(lambda body: service.complete(**body), bodies))
    with RunningService("--io-workers", "1", "--parallel", "1") as fresh:
        fresh.wait_ready()
        for body, found in zip(bodies, together, strict=True):
            assert fresh.complete(**body)["choices"] == found["choices"]


def test_a_conversation_goes_on_where_it_was(service: RunningService) -> None:
    story = f"In another land. {STORY}"
    first = service.complete(story, max_tokens=80, temperature=0)
    assert first["timings"]["cache_n"] == 0
    longer = story + first["choices"][0]["text"] + " And then"
    again = service.complete(longer, max_tokens=20, temperature=0)
    n_known = (first["usage"]["total_tokens"] - 1) // 64 * 64
    assert 0 < again["timings"]["cache_n"] <= n_known
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["timings"]["cache_n"]
    old = service.children()["compute"]
    kill(service, "compute")  # and the cache with it
    wait_until(lambda: service.children().get("compute", old) != old)
    wait_until(lambda: service.ask("GET", "/health")[0] == 200)
    fresh = service.complete(longer, max_tokens=20, temperature=0)
    assert fresh["timings"]["cache_n"] == 0
    assert fresh["choices"] == again["choices"]


def test_sixteen_streams_get_the_same_share() -> None:
    with RunningService("--io-workers", "1", "--parallel", "16") as service:
        service.wait_ready()
        counts = [0] * 16
        is_over = threading.Event()

        def client(number: int) -> None:
            body = {**LONG, "prompt": f"{number} Once", "seed": number}
            with service.open_stream("/v1/completions", body) as stream:
                for line in events(stream):
                    counts[number] += line.startswith("{")
                    if is_over.is_set():
                        return

        with ThreadPoolExecutor(16) as clients:
            running = [clients.submit(client, number) for number in range(16)]
            wait_until(lambda: all(counts))
            before = tokens_of_all(service)
            wait_until(lambda: max(tokens_of_all(service)) >= max(before) + SHARE_TOKENS)
            after = tokens_of_all(service)
            wait_until(lambda: min(counts) >= SHARE_TOKENS / 2)  # and it is sent to them
            is_over.set()
            for future in running:
                future.result()
        shares = [now - then for now, then in zip(after, before, strict=True)]
        assert min(shares) > 0.8 * max(shares), shares
        wait_until(lambda: is_idle(service))


def tokens_of_all(service: RunningService) -> list[int]:
    """What each of the running requests has by now, at one and the same moment."""
    return [entry["tokens"] for entry in service.status()["requests"]["list"]]


# Clients that leave


def test_clients_that_leave_at_random_moments_leave_nothing(service: RunningService) -> None:
    rng = random.Random(7)
    expected = service.complete(STORY, max_tokens=10, temperature=0)["choices"]
    before = service.status()["totals"]["requests"]
    enough = before["cancelled"] + 30  # some are gone before a busy service has heard them
    n_waves = 0  # so that they are queued, in their prompt, in their answer
    while n_waves < 8 or (n_waves < MANY_WAVES and n_cancelled(service) <= enough):
        n_waves += 1
        streams = []
        for _ in range(8):
            prompt = STORY * rng.choice([1, 3]) + str(rng.random())
            body = {"prompt": prompt, "max_tokens": 200, "stream": rng.random() < 0.5}
            streams.append(service.open_stream("/v1/completions", body))
            time.sleep(rng.uniform(0, 0.03))
        rng.shuffle(streams)
        for stream in streams:
            time.sleep(rng.uniform(0, 0.02))
            if rng.random() < 0.5:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stream.close()
    wait_until(lambda: is_idle(service))
    status = service.status()
    assert status["totals"]["requests"]["cancelled"] > enough
    assert status["totals"]["requests"]["error"] == before["error"]
    assert status["memory"]["kv"]["kept_blocks"] <= status["memory"]["kv"]["blocks"]
    assert service.complete(STORY, max_tokens=10, temperature=0)["choices"] == expected
    with ThreadPoolExecutor(4) as clients:  # every slot and all the room can be had
        bodies = [{"prompt": [100 + n] * 1000, "max_tokens": 20} for n in range(4)]
        assert all(clients.map(lambda body: service.complete(**body), bodies))


def n_cancelled(service: RunningService) -> int:
    found: int = service.status()["totals"]["requests"]["cancelled"]
    return found


# Processes that die


def test_a_reader_dies_and_the_answer_goes_on(service: RunningService) -> None:
    options = {"prompt": STORY, "max_tokens": 120, "seed": 1}
    expected = service.complete(**options)["choices"][0]["text"]
    with service.open_stream("/v1/completions", {**options, "stream": True}) as stream:
        lines = events(stream)
        first = next(lines)
        kill(service, "io0")
        assert text_of(iter([first, *lines])) == expected
    wait_until(lambda: service.ask("GET", "/health")[2]["state"] == "ready")
    assert service.status()["processes"][1]["restarts"] == 1
    assert is_idle(service)


def test_compute_dies(service: RunningService) -> None:
    """What ran gets an error, what waits is answered, and the state says so."""
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(service.open_stream("/v1/completions", LONG)) for _ in range(4)
        ]
        readers = [events(stream) for stream in streams]
        for reader in readers:
            next(reader)
        waiting = {**LONG, "max_tokens": 5}
        queued = events(stack.enter_context(service.open_stream("/v1/completions", waiting)))
        wait_until(lambda: service.status()["requests"]["queued"] == 1)
        n_before = n_degraded(service)
        kill(service, "compute")
        # it may be back before it is asked; that it was away is written
        wait_until(
            lambda: (
                service.ask("GET", "/health")[2]["state"] == "degraded"
                or n_degraded(service) > n_before
            )
        )
        status, _, body = service.ask("POST", "/v1/completions", {"prompt": "a"})
        assert status in (200, 503), body
        for reader in readers:
            *_, error, done = reader
            assert done == "[DONE]"
            assert json.loads(error)["error"]["type"] == "server_error"
            assert "compute" in json.loads(error)["error"]["message"]
        assert text_of(queued)
    wait_until(lambda: service.ask("GET", "/health")[2]["state"] == "ready")


def n_degraded(service: RunningService) -> int:
    return service.errors().count("event=state state=degraded")


def test_the_http_process_dies(service: RunningService) -> None:
    """Its clients lose their connection; nobody else notices, and it comes back."""
    with service.open_stream("/v1/completions", LONG) as stream:
        next(events(stream))
        before = service.children()
        cancelled = service.status()["totals"]["requests"]["cancelled"]
        kill(service, "http")
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(65536):
                pass
    assert service.complete("a", max_tokens=1)  # connections wait for the new one
    assert is_idle(service)
    assert service.status()["totals"]["requests"]["cancelled"] == cancelled + 1
    after = service.children()
    assert after["http"] != before["http"]
    assert {**after, "http": 0} == {**before, "http": 0}


# Begin and end


def test_health_tells_every_state() -> None:
    with RunningService("--io-workers", "1", "--drain", "100") as service:
        seen = []

        def look() -> str:
            try:
                status, _, body = service.ask("GET", "/health")
            except ConnectionRefusedError:
                return "closed"
            assert (status == 200) == (body["status"] == "ok")
            seen.append(body["state"])
            return str(body["state"])

        wait_until(lambda: look() == "ready")
        with service.open_stream("/v1/completions", {**LONG, "max_tokens": 600}) as stream:
            lines = events(stream)
            next(lines)
            service.process.terminate()
            wait_until(lambda: look() == "draining")
            status, headers, body = service.ask("POST", "/v1/completions", {"prompt": "a"})
            assert (status, body["error"]["code"]) == (503, "draining")
            assert "retry-after" in headers
            assert list(lines)[-1] == "[DONE]"
        assert service.end() == 143
        service.check_gone()
        assert set(seen) >= {"ready", "draining"}


def test_draining_has_an_end() -> None:
    with RunningService("--io-workers", "1", "--drain", "1") as service:
        service.wait_ready()
        with service.open_stream("/v1/completions", LONG) as stream:
            lines = events(stream)
            next(lines)
            service.process.send_signal(signal.SIGINT)
            *_, error, done = lines
            assert json.loads(error)["error"]["code"] == "draining"
            assert done == "[DONE]"
        assert service.end() == 130
        service.check_gone()


def test_a_second_signal_ends_at_once() -> None:
    slow = ("--io-workers", "1", "--kernels", "numpy")  # the answer would take minutes
    with RunningService(*slow) as service:
        service.wait_ready()
        with service.open_stream("/v1/completions", LONG) as stream:
            next(events(stream))
            service.process.terminate()
            service.wait_for("draining")
            service.process.terminate()
            assert service.end(15) == 143
            service.check_gone()
