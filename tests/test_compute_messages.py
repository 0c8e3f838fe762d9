"""Messages of a compute worker that goes wrong: none that names what is not there is heard."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import pressed_model, session
from simulation import done, need

from compute_worker.arch import resolve
from coordinator.processes.compute_messages import decoder_for_model
from io_worker.model_file import open_model
from shm.codec import MessageError
from shm.messages import (
    Adopted,
    Dropped,
    ExpertUse,
    Guess,
    Hello,
    KnownLayer,
    Progress,
    Ready,
    Release,
    Sampled,
    SlotLease,
    SlotsLost,
    TokenLogprob,
    encode,
)

N_LAYERS, N_EXPERTS, N_TOKENS = 4, 8, 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


def decoder_of(model: Path, *, has_pool: bool = True) -> Callable[[bytes], Any]:
    """What hears a compute worker."""
    return decoder_for_model(resolve(open_model(model)).slabs, N_TOKENS, has_pool=has_pool)


def known(layer: int, *experts: int, n_tokens: int = 1) -> KnownLayer:
    return KnownLayer(layer, tuple(ExpertUse(expert, n_tokens, 0) for expert in experts))


GOOD = need(N_LAYERS - 1, [0, N_EXPERTS - 1])


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        GOOD._replace(known=(0,), predicted=(7,), earlier=(known(0, 0, 7),)),
        dataclasses.replace(done(1), earlier=(known(3, 7), known(0, 0))),
        done(1, sampled=(Sampled(1, 499, 0.0, (TokenLogprob(499, 0.0),)),)),
        Adopted(3, True),
        Dropped((0, 3)),
        Guess(3, (7,)),
        Release((SlotLease(0, 1),)),
        Progress("prompt", 1, 2),
        Ready("compute", '{"experts_in": "pool"}'),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_model_has_is_heard(model: Path, message: Any) -> None:
    decode = decoder_of(model)
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        need(N_LAYERS, [0]),
        need(0, [N_EXPERTS]),
        need(0, []),
        GOOD._replace(experts=(ExpertUse(1, 1, 0), ExpertUse(1, 1, 0))),
        GOOD._replace(experts=known(0, 1, n_tokens=0).experts),
        GOOD._replace(known=(3,)),
        GOOD._replace(predicted=(N_EXPERTS,)),
        GOOD._replace(earlier=(known(0, 1), known(N_LAYERS, 1))),
        GOOD._replace(earlier=(known(0, N_EXPERTS),)),
        dataclasses.replace(done(1), earlier=(known(N_LAYERS, 1),)),
        dataclasses.replace(done(1), earlier=(known(0),)),
        dataclasses.replace(done(1), earlier=(KnownLayer(0, GOOD.experts, (N_EXPERTS,)),)),
        Guess(N_LAYERS, (0,)),
        Guess(0, (N_EXPERTS,)),
        done(1, sampled=(Sampled(1, 500, 0.0),)),
        done(1, sampled=(Sampled(1, 0, 0.0, (TokenLogprob(500, 0.0),)),)),
        Adopted(N_LAYERS, True),
        Dropped((0, N_LAYERS)),
    ],
    ids=str,
)
def test_what_the_model_has_not_is_refused(model: Path, message: Any) -> None:
    decode = decoder_of(model)
    with pytest.raises(MessageError, match="message: expected"):
        decode(encode(message))


def test_a_layer_asks_once_and_after_those_before_it(model: Path) -> None:
    decode = decoder_of(model)
    for step, layer in [(1, 0), (1, 3), (2, 0), (7, 1)]:
        asked = need(layer, [0])._replace(step=step)
        assert decode(encode(asked)) == asked
        for late in (asked, asked._replace(step=step - 1)):
            with pytest.raises(MessageError, match="message: expected a Need after"):
                decode(encode(late))
    decode(encode(Hello(1, "compute", 1, "token")))  # another worker
    decode(encode(need(0, [0])))


@pytest.mark.parametrize(
    "message",
    [
        SlotsLost(0, ()),
        Adopted(0, True),
        Dropped((0,)),
        dataclasses.replace(done(1), earlier=(known(0, 1),)),
        GOOD._replace(earlier=(known(0, 1),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_without_a_pool_nobody_tells_of_one(model: Path, message: Any) -> None:
    assert decoder_of(model)(encode(message)) == message
    with pytest.raises(MessageError, match="expected nothing of slots"):
        decoder_of(model, has_pool=False)(encode(message))


@pytest.mark.parametrize("detail", ["", "{", "[]", "{}", "[" * 100_000])
def test_a_start_is_told_as_a_whole(model: Path, detail: str) -> None:
    with pytest.raises(MessageError, match="expected a Ready"):
        decoder_of(model)(encode(Ready("compute", detail)))


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A message that is sent once in the place of one of its kind, and what is said of it."""

    kind: str
    instead: str
    why: str
    flags: tuple[str, ...] = ("--pool", "60%")


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(
            "StepDone",
            "replace(message, earlier=(KnownLayer(77, (ExpertUse(0, 1, 0),)),))",
            "expected a layer of the model, found 77",
        ),
        Wrong(
            "StepDone",
            "replace(message, earlier=(KnownLayer(0, (ExpertUse(0, 1, 0),)),))",
            "expected nothing of slots or lasting grants, found StepDone",
            ("--reader", "mmap", "--io-workers", "0"),
        ),
        Wrong("Need", "message._replace(step=999)", "sent Need of step 999"),
        Wrong("StepDone", "replace(message, step=999)", "sent StepDone of step 999"),
        Wrong("StepDone", "replace(message, sampled=2 * message.sampled)", "wants no more tokens"),
    ],
    ids=lambda wrong: wrong.why,
)
def test_a_worker_that_goes_wrong_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: Wrong
) -> None:
    """Its request ends with an error, the next one is answered."""
    flag = goes_wrong(monkeypatch, tmp_path, wrong.kind, wrong.instead)
    with session(model, *wrong.flags) as run:
        run.submit(1, [5, 6, 7], 6)
        expected = run.finish(1)
        assert len(expected) == 6
        flag.touch()
        run.submit(2, [5, 6, 7], 6)
        run.finish(2)
        error = run.listener.ended[2].error
        assert error is not None
        assert wrong.why in error
        run.submit(3, [5, 6, 7], 6)
        assert len(run.finish(3)) == 6
        run.check_idle()
        assert run.engine.restarts.counts == {"compute": 1}


def test_a_worker_that_says_nothing_of_its_start_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag = goes_wrong(monkeypatch, tmp_path, "Ready", "Ready(message.process, '{}')")
    with session(model, "--pool", "60%") as run:
        flag.touch()
        run.kill("compute")
        run.run_until(lambda: run.engine.restarts.counts["compute"] == 2)
        run.submit(1, [5, 6, 7], 6)
        assert len(run.finish(1)) == 6
        assert not flag.exists()
        assert run.engine.restarts.counts == {"compute": 2}


def test_a_reader_that_is_ready_twice_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it was told to read is read by the next one."""
    flag = goes_wrong(monkeypatch, tmp_path, "SlabsReady", "Ready('io0', '{}')")
    with session(model, "--pool", "15%") as run:
        run.submit(1, [5, 6, 7], 6)
        expected = [*run.finish(1)]
        flag.touch()
        run.listener.ended.clear()
        run.listener.n_ends.clear()
        run.submit(1, [5, 6, 7], 6)
        assert run.finish(1) == 2 * expected
        assert not flag.exists()
        run.check_idle()
        assert run.engine.restarts.counts == {"io0": 1}


def goes_wrong(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, instead: str) -> Path:
    """Have children send `instead` of the next message of a kind, as soon as a file is there."""
    flag = folder / "goes wrong"
    text = GOES_WRONG.format(flag=str(flag), kind=kind, instead=instead)
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), *sys.path]))
    return flag


GOES_WRONG = """
import pathlib
from dataclasses import replace
import shm.messages
from shm.messages import *

real, flag = shm.messages.encode, pathlib.Path({flag!r})

def encode(message):
    if isinstance(message, {kind}) and flag.exists():
        flag.unlink()
        message = {instead}
    return real(message)

shm.messages.encode = encode
"""
