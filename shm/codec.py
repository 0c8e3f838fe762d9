"""Frozen dataclasses and named tuples to msgpack and back, checked field by field.

A message travels as the array ``[tag, field, field, …]``; a nested dataclass or named tuple as the
array of its fields. Nothing else is accepted: a wrong type, a missing field, an integer out of
range or a number of fields that does not fit raises `MessageError`, never another exception. The
peer is our own process, but a damaged message must stop here and not in the slot table.

This module does not know which messages exist (see `messages`).
"""

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # a 32k-token prompt is 160 KiB; anything near this is a fault
MAX_INTEGER = 2**63 - 1

Decoder = Callable[[Any], Any]


class MessageError(Exception):
    """A control message is not what its declaration says."""


def pack(tag: str, message: Any) -> bytes:
    """Encode one message behind its tag."""
    fields = (tag, *_fields_of(message))
    # file names may hold bytes that are no text: an error that names one must still arrive
    data = msgpack.packb(
        fields, use_bin_type=True, unicode_errors="backslashreplace", default=_fields_of
    )
    return typing.cast(bytes, data)


def _fields_of(value: Any) -> tuple[Any, ...]:
    """Field values in order. msgpack asks for dataclasses, named tuples it knows itself."""
    if isinstance(value, tuple):
        return value
    return _getter(typing.cast(Hashable, type(value)))(value)


@functools.cache
def _getter(cls: Hashable) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    if len(names) < 2:  # attrgetter of one name gives the bare value
        return lambda value: tuple([getattr(value, name) for name in names])
    return operator.attrgetter(*names)


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


def encode(message: Any) -> bytes:
    """Encode a message behind the name of its class."""
    return pack(type(message).__name__, message)


def decoder_of(classes: Sequence[type]) -> Callable[[bytes], Any]:
    """The function that decodes and checks a message of one of these classes; it raises
    `MessageError` for anything that is not one."""
    decoders = {cls.__name__: decoder_for(cls) for cls in classes}

    def decode(data: bytes) -> Any:
        tag, fields = unpack(data)
        decoder = decoders.get(tag)
        if decoder is None:
            raise MessageError(f"message: unknown tag {tag!r:.40}")
        return decoder(fields)

    return decode


def decoder_for(cls: type) -> Decoder:
    """Build the function that turns a raw list into an instance of ``cls``, a dataclass or a named
    tuple."""
    hints, names = _hints_of(cls)
    decoders = [_decoder(hints[name], f"{cls.__name__}.{name}") for name in names]
    is_integers_only = _holds_integers_only(cls)

    def decode(raw: Any) -> Any:
        if not isinstance(raw, list) or len(raw) != len(decoders):
            raise MessageError(f"{cls.__name__}: expected {len(decoders)} fields")
        if is_integers_only and _are_integers(raw):
            return cls(*raw)
        return cls(*[decoder(item) for decoder, item in zip(decoders, raw, strict=True)])

    return decode


def _decoder(hint: Any, where: str) -> Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        item = arguments[0]
        if _is_record(item) and _holds_integers_only(item):
            return _records(item, where)
        return _sequence(_decoder(item, where), where, of_integers=item is int)
    if origin is tuple and arguments:
        return _fixed([_decoder(argument, where) for argument in arguments], where)
    if origin is types.UnionType and len(arguments) == 2 and arguments[1] is type(None):
        inner = _decoder(arguments[0], where)
        return lambda raw: None if raw is None else inner(raw)
    if dataclasses.is_dataclass(hint) or _is_record(hint):
        return decoder_for(typing.cast(type, hint))
    if hint is int:
        return _integer(where)
    if hint is float:
        return _real(where)
    if hint in (str, bool, bytes):
        return _exactly(hint, where)
    raise TypeError(f"{where}: no decoder for {hint!r}")


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _hints_of(cls: Any) -> tuple[dict[str, Any], list[str]]:
    """Types by name, and the names in order."""
    names = cls._fields if _is_record(cls) else [field.name for field in dataclasses.fields(cls)]
    return typing.get_type_hints(cls), list(names)


def _holds_integers_only(cls: Any) -> bool:
    hints, names = _hints_of(cls)
    return all(hints[name] is int for name in names)


def _are_integers(raw: list[Any]) -> bool:
    # all of it in C: a loop in Python costs several times as much
    return not raw or (set(map(type, raw)) == {int} and min(raw) >= 0 and max(raw) <= MAX_INTEGER)


def _records(cls: Any, where: str) -> Callable[[Any], tuple[Any, ...]]:
    """Of many named tuples of integers, the bulk of what travels per layer: checked all at once."""
    make, lengths = functools.partial(tuple.__new__, cls), {len(cls._fields)}
    one_by_one = _sequence(decoder_for(cls), where, of_integers=False)

    def decode(raw: Any) -> tuple[Any, ...]:
        is_whole = isinstance(raw, list) and set(map(type, raw)) == {list}
        is_whole = is_whole and set(map(len, raw)) == lengths
        if is_whole and _are_integers(list(itertools.chain.from_iterable(raw))):
            return tuple(map(make, raw))
        return one_by_one(raw)  # there are none, or it says what is wrong

    return decode


def _sequence(
    decode_item: Decoder, where: str, *, of_integers: bool
) -> Callable[[Any], tuple[Any, ...]]:
    def decode(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise MessageError(f"{where}: expected an array, found {type(raw).__name__}")
        if of_integers and _are_integers(raw):
            return tuple(raw)
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
