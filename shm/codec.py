"""Frozen dataclasses to msgpack and back, checked field by field.

A message travels as the array ``[tag, field, field, …]``; a nested dataclass as the array of its
fields. Nothing else is accepted: a wrong type, a missing field, an integer out of range or a number
of fields that does not fit raises `MessageError`, never another exception. The peer is our own
process, but a damaged message must stop here and not in the slot table.

This module does not know which messages exist (see `messages`).
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # a 32k-token prompt is 160 KiB; anything near this is a fault
MAX_INTEGER = 2**63 - 1

Decoder = Callable[[Any], Any]


class MessageError(Exception):
    """A control message is not what its declaration says."""


def encode_fields(value: Any) -> Any:
    """A dataclass as the list of its field values; sequences and scalars as they are."""
    if dataclasses.is_dataclass(value):
        return [encode_fields(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, tuple):
        return [encode_fields(item) for item in value]
    return value


def pack(tag: str, message: Any) -> bytes:
    """Encode one message behind its tag."""
    return typing.cast(bytes, msgpack.packb([tag, *encode_fields(message)], use_bin_type=True))


def unpack(data: bytes) -> tuple[str, list[Any]]:
    """Split an encoded message into its tag and raw fields; raises `MessageError`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"message: expected at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}"
        )
    try:
        raw = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"message: not valid msgpack ({type(error).__name__})") from error
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        raise MessageError("message: expected an array that starts with its tag")
    return raw[0], raw[1:]


def decoder_for(cls: type) -> Decoder:
    """Build the function that turns a raw list into an instance of the dataclass ``cls``."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    decoders = [_decoder(hints[name], f"{cls.__name__}.{name}") for name in names]

    def decode(raw: Any) -> Any:
        if not isinstance(raw, list) or len(raw) != len(decoders):
            raise MessageError(f"{cls.__name__}: expected {len(decoders)} fields")
        return cls(*[decoder(item) for decoder, item in zip(decoders, raw, strict=True)])

    return decode


def _decoder(hint: Any, where: str) -> Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_decoder(arguments[0], where), where)
    if origin is tuple and arguments:
        return _fixed([_decoder(argument, where) for argument in arguments], where)
    if origin is types.UnionType and len(arguments) == 2 and arguments[1] is type(None):
        inner = _decoder(arguments[0], where)
        return lambda raw: None if raw is None else inner(raw)
    if dataclasses.is_dataclass(hint):
        return decoder_for(typing.cast(type, hint))
    if hint is int:
        return _integer(where)
    if hint is float:
        return _real(where)
    if hint in (str, bool, bytes):
        return _exactly(hint, where)
    raise TypeError(f"{where}: no decoder for {hint!r}")


def _sequence(decode_item: Decoder, where: str) -> Decoder:
    def decode(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise MessageError(f"{where}: expected an array, found {type(raw).__name__}")
        return tuple([decode_item(item) for item in raw])

    return decode


def _fixed(decoders: list[Decoder], where: str) -> Decoder:
    def decode(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list) or len(raw) != len(decoders):
            raise MessageError(f"{where}: expected an array of {len(decoders)}")
        return tuple([decoder(item) for decoder, item in zip(decoders, raw, strict=True)])

    return decode


def _integer(where: str) -> Decoder:
    def decode(raw: Any) -> int:
        # bool is an int in Python; every integer we send is a count, an id or an offset
        if type(raw) is not int or not 0 <= raw <= MAX_INTEGER:
            raise MessageError(f"{where}: expected an integer 0..2^63-1, found {raw!r:.40}")
        return raw

    return decode


def _real(where: str) -> Decoder:
    def decode(raw: Any) -> float:
        if type(raw) is not float:
            raise MessageError(f"{where}: expected a float, found {raw!r:.40}")
        return raw

    return decode


def _exactly(kind: type, where: str) -> Decoder:
    def decode(raw: Any) -> Any:
        if type(raw) is not kind:
            raise MessageError(f"{where}: expected {kind.__name__}, found {raw!r:.40}")
        return raw

    return decode
