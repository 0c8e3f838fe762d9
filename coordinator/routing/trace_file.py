"""The routing trace of a run: which experts every layer of every step asked for, in order.

    bytes 0 to 8191   one JSON object (`TraceHeader`), spaces, a newline
    from 8192 on      records of 12 bytes, little endian:

    0  u32  step
    4  u16  layer
    6  u16  expert
    8  u16  tokens of the step that use it; 0 for a guess
    10 u8   those among the last 64 of a prompt chunk
    11 u8   0: a decode step, 1: a prompt chunk, 2: a guess of the router one layer before

A layer's records stand together, experts ascending; guesses for the next layer follow them,
likeliest first. Written step by step: a run that is killed leaves whole steps. One line reads it:

    numpy.fromfile(FILE, [("step", "<u4"), ("layer", "<u2"), ("expert", "<u2"), ("tokens", "<u2"),
                          ("recent", "u1"), ("kind", "u1")], offset=8192)

and `pandas.DataFrame` of that is a table. What decided while the trace was made is no part of it:
the same model, numerics and prompt give the same trace under every pool and policy.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from coordinator.command.flag_values import ConfigError
from io_worker.slabs import MAX_EXPERTS, ExpertTensor, LayerSlabs, SlabTable
from shm.messages import ExpertUse, Need

FORMAT = "moe-coord trace 1"
HEADER_BYTES = 8192
RECORD = struct.Struct("<IHHHBB")
DECODE, PROMPT, GUESS = 0, 1, 2
MAX_LAYERS = 1024
MAX_RANGE_BYTES = 2**40
MAX_FILE_BYTES = 2**28  # some 100,000 tokens of a model; a reader holds it in memory as objects

RangeBytes = tuple[int, int, int]  # of gate, up and down of one expert


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The model that was traced. `kind_of_layer` names, for each of `layers`, its slab's ranges."""

    fingerprint: str
    n_experts: int
    n_active: int
    layers: tuple[int, ...]
    slab_kinds: tuple[RangeBytes, ...]  # bytes of gate, up and down
    kind_of_layer: tuple[int, ...]

    def slab_table(self) -> SlabTable:
        """The slabs by their sizes; where they lie in a file is not in a trace."""
        layers = []
        for layer, kind in zip(self.layers, self.kind_of_layer, strict=True):
            parts = [ExpertTensor(0, 0, n_bytes, 0, 0, 0) for n_bytes in self.slab_kinds[kind]]
            layers.append(LayerSlabs(layer, *parts))
        return SlabTable(self.n_experts, tuple(layers))


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory: the `Need`s of the run without what they released."""

    header: TraceHeader
    needs: tuple[Need, ...]

    @property
    def n_steps(self) -> int:
        """Steps that asked for experts."""
        return len({need.step for need in self.needs})


def trace_header(fingerprint: str, n_active: int, slabs: SlabTable) -> TraceHeader:
    """The header for a model."""
    kinds = sorted({layer.range_bytes for layer in slabs.layers})
    return TraceHeader(
        fingerprint,
        slabs.n_experts,
        n_active,
        tuple(layer.layer for layer in slabs.layers),
        tuple(kinds),
        tuple(kinds.index(layer.range_bytes) for layer in slabs.layers),
    )


class TraceWriter:
    """Writes `Need`s as they come. A disk that fails ends the trace, not the run: see `failure`."""

    def __init__(self, file: BinaryIO, header: TraceHeader) -> None:
        self.failure: OSError | None = None
        self._file = file
        self._next_layer = dict(zip(header.layers, header.layers[1:], strict=False))
        self._step = 0
        self._records = bytearray(_header_bytes(header))

    def add(self, need: Need) -> None:
        """One more `Need`; what was collected is written when another step begins."""
        if need.step != self._step:
            self._step = need.step
            self._write()
        kind = PROMPT if is_prompt(need) else DECODE
        step, layer = need.step, need.layer
        for use in need.experts:
            self._records += RECORD.pack(
                step, layer, use.expert, use.n_tokens, use.n_recent_tokens, kind
            )
        for expert in need.predicted:
            self._records += RECORD.pack(step, self._next_layer[layer], expert, 0, 0, GUESS)

    def close(self) -> None:
        """Write the rest and close the file."""
        self._write()
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or error

    def _write(self) -> None:
        if self.failure is None:
            try:
                self._file.write(self._records)
            except OSError as error:
                self.failure = error
        self._records.clear()


def create_trace(path: Path, header: TraceHeader) -> TraceWriter:
    """A writer on a new file, or over an old one. Raises `ConfigError`."""
    try:
        return TraceWriter(path.open("wb", buffering=0), header)
    except OSError as error:
        raise ConfigError(
            f"--trace: expected a path that can be written, found {str(path)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error


def is_prompt(need: Need) -> bool:
    """Whether tokens of a prompt are among those that a `Need` is for."""
    return any(use.n_recent_tokens for use in need.experts)


def read_trace(path: Path) -> Trace:
    """A trace, as far as it goes: an unfinished record at its end is left out.

    Raises `ConfigError` for a file that is no trace, or whose records contradict its header.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refusal(path, "a readable file", error.strerror or "an error") from error
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(path, f"at most {MAX_FILE_BYTES} bytes", "more")
    header = _read_header(path, data[:HEADER_BYTES])
    return Trace(header, tuple(_needs(path, header, data)))


def _header_bytes(header: TraceHeader) -> bytes:
    fields = {"format": FORMAT, "header_bytes": HEADER_BYTES, **dataclasses.asdict(header)}
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) >= HEADER_BYTES:
        raise ConfigError(
            f"--trace: expected a header of less than {HEADER_BYTES} bytes, found {len(text)}; "
            "models of so many different layers cannot be traced"
        )
    return text.ljust(HEADER_BYTES - 1) + b"\n"


def _read_header(path: Path, data: bytes) -> TraceHeader:
    try:
        fields = json.loads(data)
        is_trace = fields["format"] == FORMAT
        header = TraceHeader(
            str(fields["fingerprint"]),
            fields["n_experts"],
            fields["n_active"],
            tuple(fields["layers"]),
            tuple((gate, up, down) for gate, up, down in fields["slab_kinds"]),
            tuple(fields["kind_of_layer"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refusal(path, "a trace as --trace writes it", "something else") from None
    if not is_trace or not _is_sound(header):
        raise _refusal(path, f"{FORMAT!r} with the layers of a model", "something else")
    return header


def _is_sound(header: TraceHeader) -> bool:
    """Whether the numbers of a header can be those of a model."""
    ranges = [n_bytes for kind in header.slab_kinds for n_bytes in kind]
    numbers = [header.n_experts, header.n_active, *header.layers, *header.kind_of_layer, *ranges]
    if not all(type(number) is int and 0 <= number <= MAX_RANGE_BYTES for number in numbers):
        return False
    n_layers, n_kinds = len(header.layers), len(header.slab_kinds)
    return (
        0 < n_layers == len(header.kind_of_layer)
        and list(header.layers) == sorted(set(header.layers))
        and max(header.layers) < MAX_LAYERS
        and max(header.kind_of_layer) < n_kinds
        and min(ranges) > 0
        and 0 < header.n_active <= header.n_experts <= MAX_EXPERTS
    )


def _needs(path: Path, header: TraceHeader, data: bytes) -> Iterator[Need]:
    """The records put together again, one `Need` per step and layer."""
    stop = len(data) - (len(data) - HEADER_BYTES) % RECORD.size
    layers = frozenset(header.layers)
    known: dict[tuple[int, int, int], ExpertUse] = {}  # most uses are alike: keep one of each
    at: tuple[int, int] | None = None
    uses: list[ExpertUse] = []
    guesses: list[int] = []
    records = RECORD.iter_unpack(memoryview(data)[HEADER_BYTES:stop])
    for step, layer, expert, n_tokens, n_recent, kind in records:
        if layer not in layers or expert >= header.n_experts or kind > GUESS:
            raise _refusal(path, "layers and experts of its header", f"{(layer, expert, kind)}")
        if kind == GUESS:
            guesses.append(expert)
            continue
        if (step, layer) != at:
            if at is not None:
                yield Need(*at, tuple(uses), tuple(guesses), ())
            at, uses, guesses = (step, layer), [], []
        if n_tokens < 1 or n_recent > n_tokens or (uses and uses[-1].expert >= expert):
            raise _refusal(path, "ascending experts, each with tokens", f"step {step}")
        use = (expert, n_tokens, n_recent)
        uses.append(known.setdefault(use, ExpertUse(*use)))
    if at is not None:
        yield Need(*at, tuple(uses), tuple(guesses), ())


def of_steps(needs: Sequence[Need]) -> Iterator[tuple[Need, ...]]:
    """The needs of one step after the other."""
    start = 0
    for stop in range(1, len(needs) + 1):
        if stop == len(needs) or needs[stop].step != needs[start].step:
            yield tuple(needs[start:stop])
            start = stop


def _refusal(path: Path, expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"TRACE: expected {expected}, found {found} in {str(path)!a:.200}; "
        "give a file that --trace wrote"
    )
