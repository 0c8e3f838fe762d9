"""Requests that come, go and are cancelled at random while processes die: what is answered is
right, and afterwards nothing is out of place."""

import random
from pathlib import Path

import pytest
from faults import Session, pressed_model, session

from coordinator.core.state import EndRequest
from coordinator.processes.restarts import MAX_DEATHS

N_REQUESTS, N_NEW = 12, 6
PROMPTS = {
    request: [(request * 37 + position * 11) % 300 for position in range(1 + request * 17 % 90)]
    for request in range(1, N_REQUESTS + 2)
}
LAST = N_REQUESTS + 1  # asked when all is over
SMALL = ("--pool", "20%", "--chunk", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """Each request alone."""
    with session(model, *SMALL) as run:
        for request, prompt in PROMPTS.items():
            run.submit(request, prompt, N_NEW)
            run.finish(request)
        return dict(run.listener.tokens)


def harm(run: Session, rng: random.Random, n_deaths: dict[str, int]) -> None:
    """Something happens to a process or a request, or nothing does."""
    name = rng.choice(["io0", "io1", "compute", "nobody", "nobody"])
    if name == "nobody":
        run.engine.end(EndRequest(rng.randint(1, N_REQUESTS), "cancelled"))
        return
    limit = 1 if name == "compute" else MAX_DEATHS - 1
    if n_deaths[name] < limit and run.engine.children.get(name) is not None:
        n_deaths[name] += 1
        run.kill(name)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_requests_and_deaths(model: Path, expected: dict[int, list[int]], seed: int) -> None:
    rng = random.Random(seed)
    n_deaths = dict.fromkeys(("io0", "io1", "compute"), 0)
    with session(model, *SMALL, "--io-workers", "2", max_running=3) as run:
        waiting = list(range(1, LAST))
        rng.shuffle(waiting)
        while waiting or len(run.listener.ended) < N_REQUESTS:
            if waiting and rng.random() < 0.3:
                request = waiting.pop()
                run.submit(request, PROMPTS[request], N_NEW)
            if rng.random() < 0.04:
                harm(run, rng, n_deaths)
            run.engine.run_once(0.02)
            run.engine.core.check()
        run.run_until(lambda: run.engine.is_ready)
        run.check_idle()
        for request, ended in run.listener.ended.items():
            drawn = run.listener.tokens.get(request, [])
            assert drawn == expected[request][: len(drawn)], request
            if ended.reason == "length":
                assert len(drawn) == N_NEW
            else:
                assert ended.reason in ("cancelled", "error")
        assert sum(n_deaths.values()) >= 1
        run.submit(LAST, PROMPTS[LAST], N_NEW)
        assert run.finish(LAST) == expected[LAST]
        run.check_idle()
