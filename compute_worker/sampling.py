"""Draws the next token of a sequence from its logits.

The rules apply in this order, each to what the one before left: repeat penalty, frequency and
presence penalties, top-k, top-p, min-p, temperature. Temperature comes last, so the cuts do not
depend on it. One uniform number from the sequence's own PCG64 generator decides; greedy uses none.
So the tokens of a sequence depend on its logits and its seed, never on what else is in the batch.

Logits of a hostile model may be NaN or infinite. They become finite at the door, and every rule
keeps at least one token.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from compute_worker.matrix import Floats
from shm.messages import Sampling, TokenLogprob

Scores = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

PENALTY_TOKENS = 64  # how far back the repeat penalty looks, prompt included
LARGEST = float(np.finfo(np.float32).max)
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; what APIs of this kind send


class SequenceSampler:
    """What one sequence needs from token to token: its generator and its last tokens."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))
        self._recent = deque(prompt[-PENALTY_TOKENS:], maxlen=PENALTY_TOKENS)
        self._drawn: Counter[int] = Counter()

    def sample(self, logits: Floats) -> tuple[int, float]:
        """Draw from logits (V): the token, and its log probability before any rule."""
        model_scores = finite(logits)
        scores = penalised(model_scores, self._recent, self._sampling.repeat_penalty)
        scores = less_often(scores, self._drawn, self._sampling)
        if self._sampling.temperature == 0:
            token = int(np.argmax(scores))  # the lowest id wins a tie
        else:
            ids = candidates(scores, self._sampling)
            token = draw(scores, ids, self._sampling.temperature, self._random.random())
        self._recent.append(token)
        self._drawn[token] += 1
        return token, log_probability(model_scores, token)


def finite(logits: npt.NDArray[np.floating]) -> Scores:
    """As float64 without NaN (least likely) and infinities (the ends of float32)."""
    if np.isfinite(logits).all():  # nearly always, and a tenth of the time
        return logits.astype(np.float64)
    return np.nan_to_num(
        logits.astype(np.float64), nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST
    ).clip(-LARGEST, LARGEST)


@np.errstate(all="ignore")
def penalised(scores: Scores, recent: Iterable[int], penalty: float) -> Scores:
    """Recent tokens made less likely: a positive score divided by `penalty`, others multiplied."""
    if penalty == 1:
        return scores
    tokens = np.unique(np.fromiter(recent, np.intp))
    found = scores[tokens]
    changed = scores.copy()
    changed[tokens] = np.where(found > 0, found / penalty, found * penalty)
    return finite(changed)


def less_often(scores: Scores, drawn: Mapping[int, int], sampling: Sampling) -> Scores:
    """Tokens that the answer has already made less likely: the two penalties of the OpenAI API.

    `drawn` counts the tokens of the answer; those of the prompt do not count.
    """
    if not drawn or (sampling.frequency_penalty == 0 and sampling.presence_penalty == 0):
        return scores
    tokens = np.fromiter(drawn.keys(), np.intp, len(drawn))
    counts = np.fromiter(drawn.values(), np.float64, len(drawn))
    changed = scores.copy()
    changed[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return finite(changed)


def candidates(scores: Scores, sampling: Sampling) -> Ids:
    """The ids that top-k, top-p and min-p leave; at least one, the likeliest.

    top-k counts, the lower id wins a tie. top-p is the smallest set of the likeliest whose share
    reaches `top_p`. min-p drops what is less likely than `min_p` times the likeliest.
    """
    ids: Ids = np.arange(len(scores))
    if 0 < sampling.top_k < len(ids):
        least = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(scores >= least)  # ties may be too many
        ids = ids[np.argsort(-scores[ids], kind="stable")][: sampling.top_k]
    if sampling.top_p < 1:
        shares = _weights(scores[ids], 1.0)
        shares /= shares.sum()
        # All that are smaller than this add up to less than 1 - top_p: no need to sort them.
        likely = shares >= (1 - sampling.top_p) / (2 * len(ids))
        ids, shares = ids[likely], shares[likely]
        order = np.argsort(-shares, kind="stable")
        n_kept = int(np.searchsorted(np.cumsum(shares[order]), sampling.top_p)) + 1
        ids = ids[order][:n_kept]
    if sampling.min_p > 0:
        least = scores.max() + math.log(min(sampling.min_p, 1.0))
        ids = ids[scores[ids] >= least]
    return ids


def draw(scores: Scores, ids: Ids, temperature: float, uniform: float) -> int:
    """The id at which the running sum of probabilities passes `uniform` in [0, 1)."""
    running = np.cumsum(_weights(scores[ids], temperature))
    total = running[-1]
    place = np.searchsorted(running, uniform * total, side="right")
    last = np.searchsorted(running, total)  # rounding may carry the product up to the total
    return int(ids[min(place, last)])


def log_probability(scores: Scores, token: int) -> float:
    """Natural logarithm of the token's share in the softmax of all scores, never infinite."""
    return _below(scores, token, _log_total(scores))


@np.errstate(all="ignore")  # the ends of float32 are further apart than float32 can say
def _log_total(scores: Scores) -> float:
    """Logarithm of the softmax's denominator, relative to the largest score.

    Exponentials in float32, a tenth of the time: they are right to 1e-7, and so is the sum.
    """
    shares = np.subtract(scores, scores.max(), dtype=np.float32, casting="same_kind")
    np.exp(shares, out=shares)
    return math.log(float(shares.sum(dtype=np.float64)))


def _below(scores: Scores, token: int, log_total: float) -> float:
    return max(float(scores[token] - scores.max()) - log_total, LOWEST_LOGPROB)


def top_logprobs(logits: Floats, n: int) -> tuple[TokenLogprob, ...]:
    """The `n` likeliest tokens of logits (V) before any rule; the lower id wins a tie."""
    if n == 0:
        return ()
    scores = finite(logits)
    n = min(n, len(scores))
    ids = np.flatnonzero(scores >= np.partition(scores, -n)[-n])  # ties may be too many
    ids = ids[np.argsort(-scores[ids], kind="stable")][:n]
    total = _log_total(scores)
    return tuple(TokenLogprob(int(id_), _below(scores, int(id_), total)) for id_ in ids)


@np.errstate(all="ignore")
def _weights(scores: Scores, temperature: float) -> Scores:
    """exp(score / temperature) relative to the largest, which is 1: the sum is at least 1."""
    scaled: Scores = scores - scores.max()
    scaled /= temperature  # in place: pages of new arrays take longer than the arithmetic
    return np.exp(scaled, out=scaled)
