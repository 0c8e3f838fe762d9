"""Messages of a compute worker that goes wrong: none that names what is not there is heard."""

import dataclasses
import sys
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
    Release,
    SlotLease,
    encode,
)

N_LAYERS, N_EXPERTS = 4, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


def known(layer: int, *experts: int, n_tokens: int = 1) -> KnownLayer:
    return KnownLayer(layer, tuple(ExpertUse(expert, n_tokens, 0) for expert in experts))


GOOD = need(N_LAYERS - 1, [0, N_EXPERTS - 1])


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        GOOD._replace(known=(0,), predicted=(7,), earlier=(known(0, 0, 7),)),
        dataclasses.replace(done(1), earlier=(known(3, 7), known(0, 0))),
        Adopted(3, True),
        Dropped((0, 3)),
        Guess(3, (7,)),
        Release((SlotLease(0, 1),)),
        Progress("prompt", 1, 2),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_model_has_is_heard(model: Path, message: Any) -> None:
    decode = decoder_for_model(resolve(open_model(model)).slabs)
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
        Adopted(N_LAYERS, True),
        Dropped((0, N_LAYERS)),
    ],
    ids=str,
)
def test_what_the_model_has_not_is_refused(model: Path, message: Any) -> None:
    decode = decoder_for_model(resolve(open_model(model)).slabs)
    with pytest.raises(MessageError, match="message: expected"):
        decode(encode(message))


def test_a_layer_asks_once_and_after_those_before_it(model: Path) -> None:
    decode = decoder_for_model(resolve(open_model(model)).slabs)
    for step, layer in [(1, 0), (1, 3), (2, 0), (7, 1)]:
        asked = need(layer, [0])._replace(step=step)
        assert decode(encode(asked)) == asked
        for late in (asked, asked._replace(step=step - 1)):
            with pytest.raises(MessageError, match="message: expected a Need after"):
                decode(encode(late))
    decode(encode(Hello(1, "compute", 1, "token")))  # another worker
    decode(encode(need(0, [0])))


def test_a_worker_that_names_what_is_not_there_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its request ends with an error, the next one is answered."""
    flag = tmp_path / "goes wrong"
    (tmp_path / "sitecustomize.py").write_text(GOES_WRONG.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    with session(model, "--pool", "60%") as run:
        run.submit(1, [5, 6, 7], 6)
        expected = run.finish(1)
        assert len(expected) == 6
        flag.touch()
        run.submit(2, [5, 6, 7], 6)
        run.finish(2)
        flag.unlink()
        error = run.listener.ended[2].error
        assert error is not None
        assert "expected a layer of the model, found 77" in error
        run.submit(3, [5, 6, 7], 6)
        assert len(run.finish(3)) == 6
        run.check_idle()
        assert run.engine.restarts.counts == {"compute": 1}


GOES_WRONG = """
import dataclasses, pathlib, sys
import shm.messages

real, known = shm.messages.encode, shm.messages.KnownLayer(77, (shm.messages.ExpertUse(0, 1, 0),))

def encode(message):
    if isinstance(message, shm.messages.StepDone) and pathlib.Path({flag!r}).exists():
        message = dataclasses.replace(message, earlier=(known,))
    return real(message)

shm.messages.encode = encode
"""
