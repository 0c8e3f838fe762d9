"""Whole runs in which compute adopts the experts: tokens stay whatever is taken away from it."""

import time
from pathlib import Path

import pytest
from arms import run_json, run_program
from faults import Session, pressed_model, session
from pressed_run import AMPLE, WAIT_SECONDS, Machine, answer, running, wait_for

from coordinator.core.slots import SlotState
from coordinator.processes.engine import Engine

OWN, POOL = (("--pool", "all", "--experts-in", kind) for kind in ("own", "pool"))
PROMPT, N_NEW = list(range(30, 60)), 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("own"))


def n_adopted(engine: Engine) -> int:
    return engine.core.residency.slots.count(SlotState.ADOPTED)


def n_slots(engine: Engine) -> int:
    return len(engine.core.residency.slots.slots)


@pytest.mark.parametrize(
    "flags", [(), ("--io-workers", "2", "--reader", "buffered"), ("--io-threads", "2")]
)
def test_tokens_stay_while_compute_gives_layers_back(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path)
    with running(model, machine, *POOL, *flags) as (engine, listener):
        expected = answer(engine, listener, 1)
        assert n_adopted(engine) == 0
    with running(model, machine, *OWN, *flags) as (engine, listener):
        memory = engine.memory
        assert n_adopted(engine) == n_slots(engine)
        assert memory.pool_bytes < memory.full_bytes // 10, "its memory went back"
        assert answer(engine, listener, 1) == expected
        assert engine.core.residency.n_needs == 0, "every layer stood before the first step"
        machine.leave(0)
        assert answer(engine, listener, 2) == expected, "shrinking meanwhile"
        wait_for(engine, n_slots(engine) - 2)
        assert n_adopted(engine) == 0
        assert answer(engine, listener, 3) == expected
        machine.leave(AMPLE)
        wait_for(engine, 0)
        assert answer(engine, listener, 4) == expected
        settle(engine)
        assert n_adopted(engine) == n_slots(engine)
        assert answer(engine, listener, 5) == expected
        assert engine.restarts.counts == {}


def settle(engine: Engine) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while engine.n_loading:
        assert time.monotonic() < deadline
        engine.run_once(0.05)
        engine.core.check()


@pytest.mark.parametrize("flags", [(), ("--io-workers", "0")])
def test_a_new_compute_worker_gets_everything_again(model: Path, flags: tuple[str, ...]) -> None:
    expected: dict[int, list[int]] = {}
    with session(model, *POOL) as run:
        for request in (1, 2, 3):
            run.submit(request, PROMPT, N_NEW)
            expected[request] = run.finish(request)
    with session(model, *OWN, *flags) as run:
        preload(run)
        run.submit(1, PROMPT, N_NEW)
        assert run.finish(1) == expected[1]
        run.submit(2, PROMPT, N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(2, [])) >= 3)
        run.kill("compute")
        run.submit(3, PROMPT, N_NEW)  # while all is read again
        assert run.finish(3) == expected[3]
        assert run.listener.ended[2].reason == "error"
        run.run_until(lambda: n_adopted(run.engine) == n_slots(run.engine))
        n_needs = run.engine.core.residency.n_needs
        run.submit(4, PROMPT, N_NEW)
        run.finish(4)
        assert run.engine.core.residency.n_needs == n_needs
        run.check_idle()


def preload(run: Session) -> None:
    run.engine.preload()
    run.run_until(lambda: run.engine.n_loading == 0)
    assert n_adopted(run.engine) == n_slots(run.engine)


@pytest.mark.parametrize("flags", [(), ("--single-process",)])
def test_the_shipped_model_in_computes_own_memory(flags: tuple[str, ...]) -> None:
    run = ("-p", "In the beginning", "-n", "12", "--ignore-eos", *flags)
    pool, own = run_json(*run, *POOL), run_json(*run, *OWN)
    assert own["tokens"] == pool["tokens"]
    memory = own["memory"]
    assert memory["experts_in_own_memory"] == 8 * 16
    assert pool["memory"]["experts_in_own_memory"] == 0
    assert own["settings"]["experts-in"] == "own"
    assert own["experts"]["misses"] == 0
    assert own["experts"]["hits"] == pool["experts"]["hits"]
    assert memory["total_peak_bytes"] <= memory["budget_bytes"]


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("--pool", "40%"), 4, "--experts-in: expected room for all 128 experts"),
        (("--pool", "all", "--usage", "counts.json"), 2, "--usage: expected --experts-in pool"),
        (("--reader", "mmap"), 2, "--experts-in: expected a reader that fills a pool"),
    ],
)
def test_where_it_cannot_be_it_is_refused(flags: tuple[str, ...], code: int, text: str) -> None:
    done = run_program("--experts-in", "own", "-p", "x", "-n", "1", *flags)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
