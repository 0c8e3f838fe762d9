"""What a routing trace says about a model: how uneven its experts are used, how alike neighbouring
tokens are, how much it touches in a while, and how well the next experts can be guessed.

Functions of `Need`s. A token of the answer is a decode step; prompts count for how often an expert
is used, not for neighbourhoods, since their tokens come together.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from coordinator.core.policies import Key
from coordinator.routing.trace_file import Trace, is_prompt, of_steps
from shm.messages import Need

LAGS = (1, 2, 4, 8, 16, 32)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SKEW_SHARES = (0.5, 0.8, 0.95)
HOT_SHARES = (0.1, 0.25, 0.5)

Token = Mapping[int, frozenset[int]]  # layer -> experts that a decode step uses


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """Experts of a layer: how many were used, and how many make up a share of all uses."""

    layer: int
    n_used: int
    n_for_share: tuple[int, ...]  # of `SKEW_SHARES`
    top_share: float  # of uses, by the expert that is used most


@dataclass(frozen=True, slots=True)
class Guessed:
    """How a predictor did: experts of the next layer or token, guessed and right."""

    predictor: str
    guessed: int
    right: int

    @property
    def accuracy(self) -> float:
        """Right ÷ guessed; 0 without guesses."""
        return self.right / max(1, self.guessed)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How much of one text's uses the hot set of another covers, and what its own would."""

    hot_share: float  # of all experts
    other_covers: float  # of uses
    own_covers: float
    common: float  # of both hot sets


def runs_of_tokens(needs: Sequence[Need]) -> Iterator[list[Token]]:
    """Decode steps that follow each other, prompt by prompt."""
    run: list[Token] = []
    for step in of_steps(needs):
        if is_prompt(step[0]):
            if run:
                yield run
            run = []
            continue
        run.append({need.layer: frozenset(use.expert for use in need.experts) for need in step})
    if run:
        yield run


def use_counts(needs: Iterable[Need]) -> Counter[Key]:
    """Tokens that used each expert."""
    counts: Counter[Key] = Counter()
    for need in needs:
        for use in need.experts:
            counts[need.layer, use.expert] += use.n_tokens
    return counts


def skew(trace: Trace) -> list[LayerSkew]:
    """Of every layer."""
    counts = use_counts(trace.needs)
    rows = []
    for layer in trace.header.layers:
        uses = [n for key, n in counts.items() if key[0] == layer]
        shares = tuple(n_for_share(uses, share) for share in SKEW_SHARES)
        rows.append(LayerSkew(layer, len(uses), shares, max(uses, default=0) / max(1, sum(uses))))
    return rows


def n_for_share(uses: Sequence[float], share: float) -> int:
    """How many of the largest make up a share of the sum."""
    total, so_far = sum(uses), 0.0
    for n, count in enumerate(sorted(uses, reverse=True)):
        if so_far >= share * total:
            return n
        so_far += count
    return len(uses)


def locality(runs: Sequence[Sequence[Token]]) -> dict[int, float]:
    """Share of a token's experts that the token so many before used too, by that distance."""
    found = {}
    for lag in LAGS:
        overlaps = [
            len(now[layer] & before[layer]) / len(now[layer])
            for run in runs
            for before, now in zip(run, run[lag:], strict=False)
            for layer in now.keys() & before.keys()
        ]
        if overlaps:
            found[lag] = mean(overlaps)
    return found


def locality_by_chance(runs: Sequence[Sequence[Token]]) -> float:
    """The same of tokens that know nothing of each other: some experts are used more often."""
    tokens = [token for run in runs for token in run]
    per_layer = []
    for layer in {layer for token in tokens for layer in token}:
        uses = Counter(expert for token in tokens for expert in token.get(layer, ()))
        n_tokens = sum(layer in token for token in tokens)
        shared = sum((n / n_tokens) ** 2 for n in uses.values())
        per_layer.append(shared / (sum(uses.values()) / n_tokens))
    return mean(per_layer) if per_layer else 0.0


def working_set(
    runs: Sequence[Sequence[Token]], slab_bytes: Mapping[int, int]
) -> dict[int, tuple[float, float]]:
    """Distinct experts and their bytes that so many tokens in a row use, by that number."""
    found = {}
    for window in WINDOWS:
        sizes = []
        for run in runs:
            for start in range(0, len(run) - window + 1, window):
                keys = {
                    (layer, expert)
                    for token in run[start : start + window]
                    for layer, experts in token.items()
                    for expert in experts
                }
                sizes.append((len(keys), sum(slab_bytes[layer] for layer, _ in keys)))
        if sizes:
            found[window] = (mean(n for n, _ in sizes), mean(size for _, size in sizes))
    return found


def predictors(trace: Trace, runs: Sequence[Sequence[Token]]) -> list[Guessed]:
    """Each guesses as many experts as the layer then uses.

    The router's guess is there where the run recorded it; the other two follow from the trace.
    """
    found = [_previous_token(runs), _most_used(runs)]
    router = _router(trace)
    return [*found, router] if router.guessed else found


def _previous_token(runs: Sequence[Sequence[Token]]) -> Guessed:
    guessed = right = 0
    for run in runs:
        for before, now in pairwise(run):
            for layer in now.keys() & before.keys():
                guessed += len(now[layer])
                right += len(now[layer] & before[layer])
    return Guessed("previous-token", guessed, right)


def _most_used(runs: Sequence[Sequence[Token]]) -> Guessed:
    guessed = right = 0
    counts: dict[int, Counter[int]] = {}
    for token in (token for run in runs for token in run):
        for layer, experts in token.items():
            seen = counts.setdefault(layer, Counter())
            if seen:
                guess = {expert for expert, _ in seen.most_common(len(experts))}
                guessed += len(experts)
                right += len(guess & experts)
            seen.update(experts)
    return Guessed("most used so far", guessed, right)


def _router(trace: Trace) -> Guessed:
    guessed = right = 0
    next_layer = dict(zip(trace.header.layers, trace.header.layers[1:], strict=False))
    for need, after in zip(trace.needs, trace.needs[1:], strict=False):
        if need.predicted and (after.step, after.layer) == (need.step, next_layer[need.layer]):
            used = {use.expert for use in after.experts}
            guess = need.predicted[: len(used)]
            guessed += len(guess)
            right += len(used & set(guess))
    return Guessed("router", guessed, right)


def transfer(trace: Trace, other: Trace) -> list[Transfer]:
    """Whether the experts that `other` uses most are those that `trace` uses."""
    counts, theirs = use_counts(trace.needs), use_counts(other.needs)
    n_all = len(trace.header.layers) * trace.header.n_experts
    total = max(1, sum(counts.values()))
    rows = []
    for share in HOT_SHARES:
        n_hot = max(1, round(share * n_all))
        own, hot = _hottest(counts, n_hot), _hottest(theirs, n_hot)
        covered, own_covered = (sum(counts[key] for key in keys) / total for keys in (hot, own))
        rows.append(Transfer(share, covered, own_covered, len(own & hot) / n_hot))
    return rows


def _hottest(counts: Counter[Key], n: int) -> frozenset[Key]:
    return frozenset(sorted(counts, key=lambda key: (-counts[key], key))[:n])
