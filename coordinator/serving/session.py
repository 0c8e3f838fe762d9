"""``--session``: KV blocks of conversations come from a file at the start and go to it at the end.

Brings the engine and the file together; the layout is `session_file`'s, which blocks are kept is
`prefixes`'. Numbers of restored sequences are above `FIRST_NUMBER`, so that no request has one.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from compute_worker.arch import KV_BLOCK_TOKENS, kv_block_bytes
from coordinator.command.sizes import format_size
from coordinator.command.terminal import Terminal
from coordinator.core.request import Restore
from coordinator.plan.setup import Setup
from coordinator.processes.engine import COMPUTE, Engine
from coordinator.serving.session_file import (
    SavedSession,
    SessionHeader,
    SessionKey,
    SessionWriter,
    check_key,
    saved_session,
)
from shm.messages import SaveBlocks

FIRST_NUMBER = 1 << 40
SAVE_SECONDS = 300.0  # gigabytes on a slow disk
MAX_SAVED_TOKENS = 500_000  # in the header; the newest conversations are saved first


@dataclass(frozen=True, slots=True)
class Session:
    """Of one run: what was saved before, and the file that takes its place."""

    saved: SavedSession | None
    writer: SessionWriter

    @property
    def fds(self) -> tuple[int, ...]:
        """What compute inherits."""
        return (self.writer.fd, *((self.saved.fd,) if self.saved is not None else ()))


@contextlib.contextmanager
def open_session(setup: Setup) -> Iterator[Session | None]:
    """The session that the settings ask for, checked; raises `ConfigError`."""
    path = setup.config.session
    if path is None:
        yield None
        return
    with saved_session(path) as saved, SessionWriter(path) as writer:
        yield Session(saved, writer)


def restore(session: Session, engine: Engine, setup: Setup, terminal: Terminal) -> None:
    """Before the first request; raises `ConfigError` for a file of another model or setting."""
    saved = session.saved
    if saved is None:
        return
    key = _key(engine, setup)
    check_key(saved, key)
    room = setup.plan.n_kv_blocks
    places = []
    offset = saved.data_start
    for tokens in saved.header.sequences:
        places.append((tokens, offset))
        offset += len(tokens) // KV_BLOCK_TOKENS * key.block_bytes
    chosen = []
    for tokens, offset in reversed(places):  # the newest first, as far as there is room
        n_blocks = min(room, len(tokens) // KV_BLOCK_TOKENS)
        room -= n_blocks
        if n_blocks:
            chosen.append((tokens[: n_blocks * KV_BLOCK_TOKENS], offset))
    for number, (tokens, offset) in enumerate(reversed(chosen), FIRST_NUMBER):
        engine.handle(Restore(number, tokens, saved.fd, offset))
    n_tokens = sum(len(tokens) for tokens, _ in chosen)
    terminal.line(f"session: {n_tokens} tokens of {len(chosen)} conversation(s) from {saved.path}")


def save(session: Session, engine: Engine, setup: Setup, terminal: Terminal) -> None:
    """After the last request. What goes wrong is a warning: the answers are given."""
    path = setup.config.session
    deadline = time.monotonic() + SAVE_SECONDS
    while engine.core.requests.running_step is not None and time.monotonic() < deadline:
        engine.run_once()  # within a step compute hears of nothing that it has to answer
    compute = engine.children.get(COMPUTE)
    if compute is None or not engine.is_up(COMPUTE):
        terminal.warning(f"--session: {path} is not saved: compute is not there")
        return
    key, sequences = _key(engine, setup), _newest(engine.core.requests.kept_sequences)
    try:
        offset = session.writer.begin(SessionHeader(key, tuple(sequences.values())))
        for number, tokens in sequences.items():
            engine.send(COMPUTE, SaveBlocks(number, session.writer.fd, offset))
            offset += len(tokens) // KV_BLOCK_TOKENS * key.block_bytes
        while len(engine.saved) < len(sequences) and time.monotonic() < deadline:
            engine.run_once()
            if engine.children.get(COMPUTE) is not compute:
                break
        problems = [text for text in engine.saved.values() if text is not None]
        if problems or len(engine.saved) < len(sequences):
            is_late = time.monotonic() >= deadline
            why = (*problems, "it takes too long" if is_late else "compute died")[0]
            terminal.warning(f"--session: cannot save {path}: {why}")
            return
        n_bytes = session.writer.complete()
    except OSError as error:
        terminal.warning(f"--session: cannot save {path}: {error.strerror}")
        return
    n_tokens = sum(map(len, sequences.values()))
    why = "" if n_tokens else f"; only whole blocks of {KV_BLOCK_TOKENS} are kept"
    terminal.line(f"session: {n_tokens} tokens saved in {path} ({format_size(n_bytes)}){why}")


def _newest(sequences: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The last ones, as many as a header holds."""
    found: dict[int, tuple[int, ...]] = {}
    n_tokens = 0
    for number, tokens in reversed(sequences.items()):
        n_tokens += len(tokens)
        if n_tokens > MAX_SAVED_TOKENS:
            break
        found[number] = tokens
    return dict(reversed(found.items()))


def _key(engine: Engine, setup: Setup) -> SessionKey:
    child = engine.children.get(COMPUTE)
    kernels = child.detail.get("kernels") if child is not None else None
    config = setup.config
    return SessionKey(
        setup.model.fingerprint,
        config.kv_type,
        config.numerics,
        str(kernels),
        kv_block_bytes(setup.spec, config.kv_type),
    )
