"""What the compute worker says, held against the model: layers, experts and tokens that there are,
and one `Need` for each layer of a step, in order.

A worker that goes wrong may name others, or ask twice. The decision core counts, evicts and reads
by these numbers and asks no more, so such a message is worth no more than one that cannot be read:
its sender is killed and started again. This module does not know what the messages are for.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from coordinator.processes.ready_detail import detail_of
from io_worker.slabs import SlabTable
from shm.codec import MessageError
from shm.messages import (
    Adopted,
    Dropped,
    ExpertUse,
    Guess,
    Hello,
    Need,
    Ready,
    SlotsLost,
    StepDone,
    TokenLogprob,
    decode,
)

BEFORE_ALL = (-1, -1)  # (step, layer)


def decoder_for_model(slabs: SlabTable, n_tokens: int, *, has_pool: bool) -> Callable[[bytes], Any]:
    """`shm.messages.decode`, which then also raises `MessageError` for what the model has not (its
    vocabulary has `n_tokens`), for what only a pool has where there is none, and for a `Need` that
    does not follow the last one since `Hello`."""
    layers = frozenset(layer.layer for layer in slabs.layers)
    last_need = BEFORE_ALL

    def decode_checked(data: bytes) -> Any:
        nonlocal last_need
        message = decode(data)
        match message:
            case Hello():
                last_need = BEFORE_ALL
            case Ready() if "experts_in" not in detail_of(message):
                raise MessageError("message: expected a Ready that says where experts will lie")
            case SlotsLost() | Adopted() | Dropped() if not has_pool:
                raise MessageError(_without_a_pool(message))
            case Need():
                if (message.step, message.layer) <= last_need:
                    raise MessageError(f"message: expected a Need after {last_need}")
                last_need = (message.step, message.layer)
                used = _check_uses(message.experts, slabs.n_experts)
                _check(message.known, used, "known experts among the layer's")
                _check(message.predicted, range(slabs.n_experts), "experts of the model")
            case Guess():
                _check(message.experts, range(slabs.n_experts), "experts of the model")
            case StepDone():
                drawn = [each for s in message.sampled for each in (s.token, *_tokens(s.top))]
                _check(drawn, range(n_tokens), "tokens of the model")
            case Dropped():
                _check(message.layers, layers, "layers of the model")
        if isinstance(message, Need | Guess | Adopted):
            _check((message.layer,), layers, "a layer of the model")
        if isinstance(message, Need | StepDone):
            if message.earlier and not has_pool:
                raise MessageError(_without_a_pool(message))
            for known in message.earlier:
                _check((known.layer,), layers, "a layer of the model")
                _check_uses(known.experts, slabs.n_experts)
                _check(known.predicted, range(slabs.n_experts), "experts of the model")
        return message

    return decode_checked


def _tokens(top: Iterable[TokenLogprob]) -> list[int]:
    return [each.token for each in top]


def _without_a_pool(message: object) -> str:
    return f"message: expected nothing of slots or lasting grants, found {type(message).__name__}"


def _check_uses(uses: Sequence[ExpertUse], n_experts: int) -> set[int]:
    """The experts, each of the model, named once, and used."""
    used = {use.expert for use in uses}
    if not used or max(used) >= n_experts or len(used) < len(uses):
        raise MessageError(f"message: expected experts 0 to {n_experts - 1}, each once")
    if not all(use.n_tokens for use in uses):
        raise MessageError("message: expected experts that a token uses, found 0 tokens")
    return used


def _check(found: Iterable[int], allowed: Collection[int], expected: str) -> None:
    for number in found:
        if number not in allowed:
            raise MessageError(f"message: expected {expected}, found {number}")
