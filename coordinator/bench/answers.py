"""What the blocks of a comparison say: findings with intervals, and a sentence for each claim.

Nothing is claimed of fewer than `MIN_CLAIM_PAIRS` pairs, nor where the interval includes 1: then
the sentence says how large a difference the interval still allows. Functions of records.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record, by_round, in_room
from coordinator.bench.rooms import WHOLE_MACHINE, Room
from coordinator.bench.statistics import MIN_PAIRS, Ratio, paired_ratio

# of 6 pairs without a difference all lie on one side of 1 in 3 of 100 cases; of 4 in 12
MIN_CLAIM_PAIRS = 6
MIN_EXPERT_BYTES = 256 << 20  # of fewer a disk is not asked for anything
PATHS = {"speed": ("tok_s",), "bytes": ("bytes", "per_token")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One pair in one room. `ratio` None: no round has both."""

    subject: str
    than: str
    what: str
    room: str
    reference_room: str
    arm: str
    reference: str
    ratio: Ratio | None

    @property
    def verdict(self) -> str:
        """more, less, none (no difference found), few (pairs), or nothing (measured)."""
        if self.ratio is None:
            return "nothing"
        if self.ratio.n_pairs < MIN_CLAIM_PAIRS:
            return "few"
        if not self.ratio.excludes_one:
            return "none"
        return "more" if self.ratio.median > 1 else "less"

    @property
    def width(self) -> float | None:
        """Of the interval, as a share of the ratio."""
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return None
        return (self.ratio.high - self.ratio.low) / self.ratio.median


@dataclass(frozen=True, slots=True)
class Claim:
    """The findings of one pair in all rooms, and the sentence that they allow."""

    sentence: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a question. The headline is the first claim's sentence, or why there is none."""

    question: str
    headline: str
    claims: tuple[Claim, ...]
    is_too_small: bool

    def as_json(self) -> dict[str, Any]:
        """As answers.json has it."""
        return {
            "question": self.question,
            "headline": self.headline,
            "too_small": self.is_too_small,
            "claims": [
                {
                    "sentence": claim.sentence,
                    "findings": [
                        {
                            **{k: v for k, v in asdict(found).items() if k != "ratio"},
                            **(asdict(found.ratio) if found.ratio is not None else {}),
                            "verdict": found.verdict,
                        }
                        for found in claim.findings
                    ],
                }
                for claim in self.claims
            ],
        }


def answer_of(
    records: Sequence[Record], sweep: Sweep, rooms: Sequence[Room], expert_bytes: int
) -> Answer:
    """The answer to a question; `expert_bytes` are all experts of the model."""
    claims = []
    for pair in sweep.pairs:
        found = tuple(findings(records, pair, rooms))
        claims.append(Claim(sentence(found), found))
    is_too_small = sweep.question != "arms" and expert_bytes < MIN_EXPERT_BYTES
    if is_too_small:
        headline = (
            f"too small to answer: the experts take {expert_bytes / 2**20:.0f} MiB, which no disk "
            f"is slow with; expected {MIN_EXPERT_BYTES >> 20} MiB or more; name a larger model, "
            "or leave it out and give --synth"
        )
    else:
        headline = claims[0].sentence if claims else "one arm: nothing is compared"
    return Answer(sweep.question, headline, tuple(claims), is_too_small)


def findings(records: Sequence[Record], pair: Pair, rooms: Sequence[Room]) -> list[Finding]:
    """Of a pair, in each room; one across rooms where it says so."""
    path = PATHS[pair.what]

    def found(over: str, under: str) -> Finding:
        values = _aligned(
            by_round(in_room(records, over), pair.arm, path),
            by_round(in_room(records, under), pair.reference, path),
        )
        return Finding(
            pair.subject, pair.than, pair.what, over, under, pair.arm, pair.reference,
            paired_ratio(*values),
        )  # fmt: skip

    if pair.rooms is not None:
        more, less = pair.rooms
        return [found(more.name, less.name)]
    return [found(room.name, room.name) for room in rooms]


def sentence(found: Sequence[Finding]) -> str:
    """One sentence for a pair in all its rooms."""
    parts: list[str] = []
    for each in found:
        is_told = each.room == each.reference_room != WHOLE_MACHINE
        where = f" with {each.room}" if is_told else ""
        parts.append(_words(each, is_first=not parts) + where)
    return "On this machine " + "; ".join(parts) + "."


def widths(answer: Answer) -> str | None:
    """How wide the intervals became, for people; None without any pair."""
    shares = [found.width for claim in answer.claims for found in claim.findings]
    known = [share for share in shares if share is not None]
    counts = [
        found.ratio.n_pairs
        for claim in answer.claims
        for found in claim.findings
        if found.ratio is not None
    ]
    if not counts:
        return None
    same = min(counts) == max(counts)
    most = f"{max(counts)} pair{'s' if max(counts) > 1 else ''}"
    if not known:
        return f"{most} of each: too few for an interval, which takes {MIN_PAIRS}"
    pairs = most if same else f"{min(counts)} to {max(counts)} pairs"
    return f"{pairs}; the intervals are {min(known):.0%} to {max(known):.0%} of their ratio wide"


def shown(ratio: Ratio) -> str:
    """``1.23 × [1.18, 1.29]``."""
    text = f"{ratio.median:.2f} ×"
    if ratio.low is not None and ratio.high is not None:
        text += f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return text


def _words(found: Finding, *, is_first: bool) -> str:
    """The first part of a sentence names what is compared; the others do without."""
    ratio = found.ratio
    if found.verdict == "nothing" or ratio is None:
        said = f"nothing was measured of {found.subject} against {found.than}"
        return said if is_first else "nothing was measured"
    if found.verdict == "few":
        rounds = "1 pair is" if ratio.n_pairs == 1 else f"{ratio.n_pairs} pairs are"
        said = f"{rounds} too few for a claim ({shown(ratio)})"
        return f"{found.subject} against {found.than}: {said}" if is_first else said
    if found.verdict == "none":
        said = f"at most {ratio.low:.2f} to {ratio.high:.2f} ×"
        if is_first:
            return f"no difference found between {found.subject} and {found.than} ({said})"
        return f"no difference found ({said})"
    verb, tail = f"is {shown(ratio)} as fast as", ""
    if found.what == "bytes":
        verb = f"reads {shown(ratio)} the bytes per token of"
        tail = f", which alone would make it {1 / ratio.median:.2f} × as fast,"
    return (f"{found.subject} {verb} {found.than}" if is_first else shown(ratio)) + tail


def _aligned(
    values: list[float | None], references: list[float | None]
) -> tuple[list[float | None], list[float | None]]:
    """Both with as many rounds as the longer has."""
    n_rounds = max(len(values), len(references))
    return (
        values + [None] * (n_rounds - len(values)),
        references + [None] * (n_rounds - len(references)),
    )
