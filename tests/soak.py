"""Many clients and many that leave: whether a service stays right, fair and empty.

    python tests/soak.py --clients 16 --seconds 120 --disconnects 300 [-- FLAGS OF THE SERVICE]

Starts a service on the shipped model. Clients ask, one request after the other, with prompts, seeds
and lengths of their own at temperature 0.8; afterwards a sample of their answers is computed
again by a fresh service that has nothing else to do, and must be the same: text, tokens and the
bits of their probabilities. Then clients leave while they are queued, in their prompt or in their
answer, and after each the service must soon be rid of it. Exits with 1 where something failed.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from running_service import RunningService, events, post

TEXT = "And it came to pass in those days, that there went out a decree from the king. "
N_COMPARED = 40
FREE_SECONDS = 1.0  # after a client left; a step that takes longer may end first
FULL_EVERY = 50  # disconnects, then the whole KV cache is asked for
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection ends without a goodbye


@dataclass(frozen=True, slots=True)
class Answer:
    """One request and what came of it."""

    body: dict[str, Any]
    text: str
    log_probabilities: tuple[tuple[str, float], ...]
    reason: str | None


@dataclass(slots=True)
class Client:
    """One that asks again and again; `n_tokens` are those that came while all were asking."""

    number: int
    answers: list[Answer] = field(default_factory=list)
    n_tokens: int = 0
    n_refused: int = 0
    faults: list[str] = field(default_factory=list)


def body_of(rng: random.Random) -> dict[str, Any]:
    """A request: prompts of 1 to 500 tokens, some of which begin alike."""
    return {
        "prompt": TEXT[: rng.randint(0, 40)]
        + TEXT * rng.choice([0, 0, 1, 4, 20])
        + rng.choice("ab"),
        "max_tokens": rng.randint(10, 120),
        "temperature": 0.8,
        "seed": rng.randrange(2**31),
        "logprobs": 1,
        "stream": True,
    }


def chunks_of(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The objects of a stream, or the error that came instead. Raises `ConnectionError`."""
    is_done = False
    for line in events(connection):
        is_done = line == "[DONE]"
        if line.startswith("{"):
            yield json.loads(line)
    if not is_done:
        raise ConnectionError("the stream ended without [DONE]")


def answer_of(service: RunningService, body: dict[str, Any], client: Client) -> Answer | None:
    """One answer, read to its end. None: refused because too many wait, or wrong (noted)."""
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", body))
        status = connection.recv(len("HTTP/1.1 200"), socket.MSG_PEEK | socket.MSG_WAITALL)
        if not status.endswith(b"200"):
            if status.endswith(b"429"):
                client.n_refused += 1
                time.sleep(0.2)
            else:
                client.faults.append(connection.recv(65536).decode())
            return None
        text, drawn, reason = "", list[tuple[str, float]](), None
        for chunk in chunks_of(connection):
            if "error" in chunk:
                client.faults.append(str(chunk["error"]))
                return None
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                found = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                drawn += zip(found["tokens"], found["token_logprobs"], strict=True)
                client.n_tokens += len(found["tokens"])
        return Answer(body, text, tuple(drawn), reason)


def ask_until(service: RunningService, client: Client, deadline: float) -> None:
    """One client's life."""
    rng = random.Random(client.number)
    while time.monotonic() < deadline and len(client.faults) < 3:
        try:
            answer = answer_of(service, body_of(rng), client)
        except OSError as error:
            client.faults.append(repr(error))
            continue
        if answer is not None:
            client.answers.append(answer)


def soak(service: RunningService, n_clients: int, seconds: float) -> list[Client]:
    """All clients at once, for so long."""
    clients = [Client(number) for number in range(n_clients)]
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(n_clients) as threads:
        for future in [threads.submit(ask_until, service, c, deadline) for c in clients]:
            future.result()
    return clients


def report(clients: list[Client], seconds: float) -> list[str]:
    """Prints who got how much. Faults are returned."""
    counts = [client.n_tokens for client in clients]
    mean = statistics.mean(counts) or 1.0
    n_answers = sum(len(client.answers) for client in clients)
    n_refused = sum(client.n_refused for client in clients)
    print(
        f"{len(clients)} clients, {n_answers} answers, {n_refused} times 429; "
        f"{sum(counts) / seconds:.1f} tokens/s; tokens per client ÷ mean: "
        f"{min(counts) / mean:.2f} to {max(counts) / mean:.2f}",
        flush=True,
    )
    return [f"client {client.number}: {fault}" for client in clients for fault in client.faults]


def compare(clients: list[Client], flags: list[str]) -> list[str]:
    """A sample of the answers, each computed alone by a fresh service."""
    answers = [answer for client in clients for answer in client.answers]
    sample = random.Random(0).sample(answers, min(N_COMPARED, len(answers)))
    alone, faults = Client(-1), []
    with RunningService(*flags, "--parallel", "1") as service:
        service.wait_ready()
        for answer in sample:
            again = answer_of(service, answer.body, alone)
            if again != answer:
                faults.append(f"differs alone:\n  {answer}\n  {again}")
    print(f"{len(sample)} answers computed again alone: {len(faults)} differ", flush=True)
    return [*alone.faults, *faults]


# Clients that leave


def leave(connection: socket.socket, rng: random.Random) -> None:
    """As clients do: with a goodbye, or without."""
    if rng.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


def seconds_until_rid(service: RunningService, n_left: int) -> float:
    """How long until only so many requests are there, and without any no slot is in use or being
    read. Gives up after ten times what is allowed."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < 10 * FREE_SECONDS:
        status = service.status()
        if len(status["requests"]["list"]) <= n_left:
            busy = sum(c["in_use"] + c["loading"] + c["condemned"] for c in status["slots"])
            if n_left or not busy:
                return waited
        time.sleep(0.005)
    return waited


def leave_at_random(service: RunningService, n_disconnects: int) -> list[str]:
    """Waves of clients that all leave; prints where their requests stood."""
    rng, faults = random.Random(3), list[str]()
    phases, waits = Counter[str](), list[float]()
    while len(waits) < n_disconnects:
        streams = []
        for n_prompt in rng.sample(range(2, 600), rng.randint(1, 10)):  # its length is its name
            prompt = [rng.randrange(100, 400) for _ in range(n_prompt)]
            body = {**body_of(rng), "prompt": prompt, "max_tokens": 400, "logprobs": None}
            body["stream"] = rng.random() < 0.7
            streams.append((n_prompt, service.open_stream("/v1/completions", body)))
            time.sleep(rng.choice([0, rng.uniform(0, 0.1)]))
        rng.shuffle(streams)
        while streams:
            time.sleep(rng.choice([0, rng.uniform(0, 0.2)]))
            n_prompt, stream = streams.pop()
            found = service.status()["requests"]["list"]
            phases.update(r["phase"] for r in found if r["prompt_tokens"] == n_prompt)
            leave(stream, rng)
            waits.append(seconds_until_rid(service, len(streams)))
            if waits[-1] > FREE_SECONDS:
                faults.append(f"{waits[-1]:.2f} s after a client left: {service.status()}")
        if len(waits) // FULL_EVERY > (len(waits) - 10) // FULL_EVERY:
            faults += whole_cache(service)
    print(
        f"{len(waits)} clients left ({dict(phases)}); their requests were gone after "
        f"{statistics.median(waits) * 1000:.0f} ms (median), {max(waits) * 1000:.0f} ms at most",
        flush=True,
    )
    return faults


def whole_cache(service: RunningService) -> list[str]:
    """As many of the longest requests as run at a time: no block may be lost."""
    status = service.status()
    n_parallel, n_context = status["requests"]["parallel"], status["model"]["n_context"]
    bodies = [{"prompt": [100 + n] * (n_context - 8), "max_tokens": 8} for n in range(n_parallel)]
    with ThreadPoolExecutor(n_parallel) as clients:
        found = clients.map(lambda body: service.ask("POST", "/v1/completions", body), bodies)
        return [str(answer) for answer in found if answer[0] != 200]


def drain_errors(service: RunningService, is_over: threading.Event) -> None:
    """Keeps its log from filling the pipe."""
    while not is_over.wait(0.2):
        service.errors()


def main() -> int:
    """Prints figures and faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--disconnects", type=int, default=300)
    parser.add_argument("flags", nargs="*", help="of the service, after --")
    arguments = parser.parse_args()
    flags = arguments.flags or ["--io-workers", "1"]
    is_over = threading.Event()
    with RunningService(*flags) as service, ThreadPoolExecutor(1) as reading:
        service.wait_ready()
        reading.submit(drain_errors, service, is_over)
        with contextlib.ExitStack() as stack:
            stack.callback(is_over.set)
            clients = soak(service, arguments.clients, arguments.seconds)
            faults = report(clients, arguments.seconds)
            faults += leave_at_random(service, arguments.disconnects)
            service.process.terminate()
            service.process.wait()
        service.check_gone()
    faults += compare(clients, flags)
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
