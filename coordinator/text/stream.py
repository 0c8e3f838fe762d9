"""Token ids to text while they arrive: never half a character, never a part of a stop string.

Knows bytes and stop strings; does not know ids that end an answer (`Tokenizer.stop_ids`). Rule to
keep: what is printed does not depend on how the text is cut into tokens.
"""

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a stream needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token prints."""


class TextStream:
    """The text of one answer, piece by piece.

    `stopped` names the stop string that ended it, else None. Of several stop strings the one that
    is complete first counts; of those that end together, the longest.
    """

    __slots__ = ("_decoder", "_held", "_stop", "_tokenizer", "stopped")

    def __init__(self, tokenizer: TokenBytes, stop: tuple[str, ...]) -> None:
        assert all(stop), "an empty stop string would end every answer"
        self._tokenizer = tokenizer
        self._stop = stop
        # Bytes that may still become a character stay in the decoder; those that never can become
        # U+FFFD at once.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # printed by nobody yet: it could begin a stop string
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that is now certain. Empty once `stopped`."""
        if self.stopped is not None:
            return ""
        self._held += self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._release(self._n_undecided())

    def finish(self) -> str:
        """The rest, when no more tokens come; an unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(0)

    def _release(self, n_kept: int) -> str:
        """Give out all but the last `n_kept` characters, or what is before a stop string."""
        found = [(self._held.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, self.stopped = min(ends)
            text, self._held = self._held[:start], ""
            return text
        cut = len(self._held) - n_kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _n_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-n:]
            if any(stop.startswith(end) for stop in self._stop):
                return n
        return 0
