"""Every message that travels between processes, with who sends, who receives and what answers.

Control travels in messages, slab bytes stay in the pool. All fields are non-negative integers,
floats, text, or tuples of those; times are nanoseconds of the system-wide monotonic clock.

``C`` is the coordinator, ``W`` an I/O worker, ``X`` the compute worker. With ``--io-workers 0``
the compute worker takes the part of ``W`` too.

One step, with one miss::

    C -> X  Step                 C -> W  ReadSlabs
    X -> C  Need (layer 0)       W -> X  SlabNotice (through a pipe, see `notices`)
    C -> X  Grant (hits, and     W -> C  SlabsReady
            the miss's place)    X -> C  Need (layer 1, carries the releases of layer 0) …
                                 X -> C  StepDone

A lasting `Grant` is good beyond its layer, until `Evicted` names the expert: what compute knows it
computes at once, and a layer of which it knows all is told with the next message (`earlier`).

Messages are dataclasses. Those of every layer, and what they carry by the dozen, are named tuples:
Python makes, compares, hashes and packs these in C, and with caches that the kernels have just
swept that is most of what a message costs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from shm.codec import MessageError, decoder_of
from shm.codec import encode as encode

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """W or X -> C, first message. Answered by `Welcome`."""

    protocol: int
    process: str  # "io0", "io1", …, "compute"
    pid: int
    token: str  # the run's secret, given at spawn: a stranger on the socket does not know it


@dataclass(frozen=True, slots=True)
class Welcome:
    """C -> W or X, answers `Hello`. `settings` is a packed dataclass of the receiver's package."""

    protocol: int
    settings: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """W or X -> C: start-up finished (model opened, weights loaded, mapping populated)."""

    process: str
    detail: str  # JSON: what was chosen and measured at start, for the first lines of a run


@dataclass(frozen=True, slots=True)
class Progress:
    """W or X -> C during start-up: a long phase advances. Not answered."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 switch a rule off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int
    frequency_penalty: float = 0.0  # taken from a token's score for each time it was drawn
    presence_penalty: float = 0.0  # taken once if it was drawn at all


@dataclass(frozen=True, slots=True)
class Submit:
    """C -> X: a sequence begins. Its tokens are computed when `Step` names it. Not answered."""

    request: int
    prompt: tuple[int, ...]
    sampling: Sampling
    n_context: int  # tokens that the sequence may reach; its KV blocks are charged as it grows
    keep_logits: bool  # `eval`: logits and chosen experts of every prompt token are kept
    n_top_logprobs: int = 0  # likeliest tokens that each `Sampled` tells
    prefix_of: int | None = (
        None  # a sequence that is over and kept: its first blocks are taken over
    )
    n_prefix_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens ``[start, start + n_tokens)`` of one sequence, computed in one step."""

    request: int
    start: int
    n_tokens: int
    sample: bool  # draw the next token after the last of these


@dataclass(frozen=True, slots=True)
class Step:
    """C -> X: compute layers ``[first_layer, stop_layer)`` of a ragged batch; answer: `StepDone`.

    A prompt chunk may be cut at layer boundaries: the step that begins at layer k > 0 continues the
    hidden state which the step of the same slices left at k. With each layer, `n_guesses` experts
    are told that the next one will probably need.
    """

    step: int
    slices: tuple[Slice, ...]
    first_layer: int
    stop_layer: int
    n_guesses: int = 0


class ExpertUse(NamedTuple):
    """One expert of a `Need`. `n_recent_tokens`: those among a prompt slice's last 64."""

    expert: int
    n_tokens: int
    n_recent_tokens: int


class SlotLease(NamedTuple):
    """A slot with the generation of its content: what is granted and given back."""

    slot: int
    generation: int


class KnownLayer(NamedTuple):
    """X -> C, in the next `Need` or `StepDone`: a layer that needed no grant, since all its experts
    had a lasting one. Not answered."""

    layer: int
    experts: tuple[ExpertUse, ...]
    predicted: tuple[int, ...] = ()  # see `Need`


@dataclass(frozen=True, slots=True)
class Guess:
    """X -> C, at a layer that sends no `Need`: experts that the next one will probably need and
    that no grant covers, likeliest first. Not answered."""

    layer: int  # the next one
    experts: tuple[int, ...]


class Need(NamedTuple):
    """X -> C, one per layer: all its experts, ascending. Answered by one or more `Grant`, which do
    not name the `known` ones: the sender computes with these already."""

    step: int
    layer: int
    experts: tuple[ExpertUse, ...]
    predicted: tuple[int, ...]  # experts of the next layer, likeliest first; a guess
    released: tuple[SlotLease, ...]
    known: tuple[int, ...] = ()
    earlier: tuple[KnownLayer, ...] = ()  # since the last message, in order


class Location(NamedTuple):
    """Where an expert lies: byte offsets of its three matrices in a region. Region 0 is the pool,
    1..n are the mapped model files (see `mapped_files`), where the lease means nothing."""

    expert: int
    lease: SlotLease
    region: int
    gate: int
    up: int
    down: int


class ReadSpan(NamedTuple):
    """When a slab was on its way from the disk: first byte asked for to last byte there."""

    start_ns: int
    stop_ns: int


class Grant(NamedTuple):
    """C -> X: experts that may be computed now. `n_waiting` experts of the `Need` have no slot yet:
    while it is not 0 the receiver sends each `Release` at once. A standing grant covers a whole
    layer until `Revoke` and needs no release. Those `on_the_way` are granted too, each from its
    `SlabNotice` on; what comes without a notice is granted once more, when it is there. If the
    first grant of a layer is `lasting`, what it and those after it name is granted for longer.
    Lasting grants of the `evicted` end before anything of this one is used."""

    layer: int
    locations: tuple[Location, ...]
    reads: tuple[ReadSpan, ...]  # of those locations that had to be read for this `Need`
    n_waiting: int
    standing: bool
    step: int = 0  # of the `Need` it answers; a grant of a layer that is over says nothing
    on_the_way: tuple[Location, ...] = ()
    lasting: bool = False
    evicted: tuple[tuple[int, int], ...] = ()  # see `Evicted`


@dataclass(frozen=True, slots=True)
class Evicted:
    """C -> X: lasting grants of these experts (layer, expert) end. Not answered, so it is told only
    where compute uses none of them: with a `Grant` that it waits for, or between two steps."""

    keys: tuple[tuple[int, int], ...]


class SlabNotice(NamedTuple):
    """W -> X, through a pipe (see `notices`): the slab lies in its slot. Not answered."""

    lease: SlotLease
    span: ReadSpan


@dataclass(frozen=True, slots=True)
class Revoke:
    """C -> X: the standing grants of these layers end. A layer that is being computed may still be
    using its slots; before the next step nothing does. Answered by `Dropped`."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopt:
    """C -> X, between two steps: copy these experts of a layer that stands into memory of your own,
    and compute with the copies from then on. Answered by `Adopted`."""

    layer: int
    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """X -> C, answers `Adopt`: their slots are not used any more. Without memory for copies
    (`has_copies` False) they are used as before."""

    layer: int
    has_copies: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """X -> C, answers `Revoke`: whatever was adopted of these layers is gone, and its memory went
    back to the system."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """C -> X: an expert of the step cannot be had. Answered by `StepDone` with `cancelled`."""

    step: int


@dataclass(frozen=True, slots=True)
class Release:
    """X -> C: these experts are computed and their slots may be written again. Not answered."""

    released: tuple[SlotLease, ...]


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """X -> C: these slots do not hold what their grant says: something wrote over their headers, so
    nothing in them can be trusted. They are read again; those that the layer needs are granted
    anew, each by a `Grant`. A standing grant with one of them is void."""

    layer: int
    lost: tuple[SlotLease, ...]


class ReadRange(NamedTuple):
    """``n_bytes`` from ``file_offset`` of file ``file`` to ``pool_offset`` of the pool."""

    file: int
    file_offset: int
    n_bytes: int
    pool_offset: int


class SlabRead(NamedTuple):
    """One expert to be read into one slot: gate, up, down."""

    lease: SlotLease
    layer: int
    expert: int
    ranges: tuple[ReadRange, ...]


class ReadSlabs(NamedTuple):
    """C -> W: read these, in order. Each is answered by `SlabsReady` or `ReadFailed`."""

    reads: tuple[SlabRead, ...]


@dataclass(frozen=True, slots=True)
class SlotsPunched:
    """C -> W: the memory of these slots went back to the system: what a reader set up for writing
    there (page table entries) is gone. Not answered."""

    slots: tuple[int, ...]


class SlabsReady(NamedTuple):
    """W -> C: the slab lies in its slot. A lease that is no longer current is dropped."""

    lease: SlotLease
    start_ns: int
    stop_ns: int
    bytes_read: int  # of the slab itself
    bytes_over_read: int  # what alignment added
    noticed: bool = False  # compute was told with a `SlabNotice`


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """W -> C: the slab could not be read."""

    lease: SlotLease
    errno: int  # 0: not an errno, the text says it
    text: str
    model_changed: bool  # the file shrank or was written to: nothing that was read can be trusted


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability before any sampling rule."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for one sequence of a step. `top`: the likeliest, in descending order."""

    request: int
    token: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's wall time went, nanoseconds. `other` parts are the rest of `wall_ns`."""

    wall_ns: int
    compute_ns: int
    wait_disk_ns: int
    coordination_ns: int
    major_faults: int
    minor_faults: int
    experts_ns: int = 0  # of `compute_ns`: the kernels of the experts


@dataclass(frozen=True, slots=True)
class StepDone:
    """X -> C, answers `Step`."""

    step: int
    sampled: tuple[Sampled, ...]
    times: StepTimes
    standing_uses: int  # experts used through standing grants: hits that no `Need` told of
    released: tuple[SlotLease, ...]
    cancelled: bool  # stopped at a layer boundary since `Cancel` arrived, or because of `failure`
    earlier: tuple[KnownLayer, ...] = ()  # since the last `Need`, in order
    failure: str | None = None  # what could not be read: the requests of the step end with it


@dataclass(frozen=True, slots=True)
class Finished:
    """C -> X: the sequence ended; its KV blocks are free but for the first `n_kept_blocks`, which
    stay under its number until `Forget`. Not answered."""

    request: int
    reason: str  # "eos", "length", "stop", "cancelled", "error"
    n_kept_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Forget:
    """C -> X: the blocks that this ended sequence still holds are free. Not answered."""

    request: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """C -> X, between steps: read KV blocks of an ended sequence. Not answered."""

    request: int
    n_blocks: int
    fd: int  # inherited, as below
    offset: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """C -> X, between steps: write the kept blocks of an ended sequence. Answer: `BlocksSaved`."""

    request: int
    fd: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """X -> C, answers `SaveBlocks`."""

    request: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """C -> X: stop this sequence at the next layer boundary, if its step is running."""

    request: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """W or X -> C, at least every second while alive. Not answered."""

    process: str
    n_done: int  # reads finished, or layers computed: hanging is judged by progress


@dataclass(frozen=True, slots=True)
class Failed:
    """W or X -> C: this process cannot go on and exits with `exit_code` after sending this."""

    process: str
    exit_code: int
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """C -> W or X: finish and exit 0. Not answered."""


MESSAGES: tuple[type, ...] = (
    Hello, Welcome, Ready, Progress, Submit, Step, Guess, Need, Grant, Evicted, Revoke, Adopt,
    Adopted, Dropped, Abort, Release, SlotsLost, ReadSlabs, SlotsPunched, SlabsReady, ReadFailed,
    StepDone, Finished, Forget, LoadBlocks, SaveBlocks, BlocksSaved, Cancel, Heartbeat, Failed,
    Stop,
)  # fmt: skip
decode = decoder_of(MESSAGES)


def welcomed(message: Any) -> bytes:
    """The settings that `Welcome` brings; raises `MessageError` for anything else."""
    if not isinstance(message, Welcome):
        raise MessageError(f"link: expected Welcome, found {type(message).__name__}")
    if message.protocol != PROTOCOL_VERSION:
        raise MessageError(
            f"link: expected protocol {PROTOCOL_VERSION}, found {message.protocol}; "
            "all processes must come from one installation"
        )
    return message.settings
