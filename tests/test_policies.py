"""One contract for all policies; each against a plain model of what it says it does."""

import math
import random
from collections.abc import Callable, Mapping

import pytest

from coordinator.core.frequency import HALF_LIFE_TOKENS, SEED_TOKENS, Lfu, Repeats
from coordinator.core.hot_set import CALIBRATED_SHARE, LEARNING_TOKENS, Calibrated, Static
from coordinator.core.policies import (
    SLRU_PROTECTED_SHARE,
    Key,
    LayerLru,
    Lru,
    Policy,
    PolicyGeometry,
    Slru,
)

N_LAYERS, N_EXPERTS = 4, 6
GEOMETRY = PolicyGeometry({0: 0, 1: 1, 2: 0, 3: 1}, (7, 9))
USAGE: Mapping[Key, float] = {(0, 1): 5.0, (2, 4): 4.0, (1, 3): 3.0, (3, 0): 2.0, (0, 5): 1.0}
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "lru": lambda: Lru(GEOMETRY),
    "layer-lru": lambda: LayerLru(GEOMETRY),
    "lfu": lambda: Lfu(GEOMETRY),
    "lfu with counts": lambda: Lfu(GEOMETRY, USAGE),
    "slru": lambda: Slru(GEOMETRY),
    "static": lambda: Static(GEOMETRY, USAGE, lambda n_slots: n_slots - 2),
    "calibrated": lambda: Calibrated(GEOMETRY, {}),
    "calibrated with counts": lambda: Calibrated(GEOMETRY, USAGE),
}


def class_of(key: Key) -> int:
    return GEOMETRY.class_of_layer[key[0]]


def layers_beside(layer: int) -> tuple[int, ...]:
    """All layers of its class."""
    return GEOMETRY.layers_of_classes()[GEOMETRY.class_of_layer[layer]]


def anyone(policy: Policy, layer: int) -> Key | None:
    """The victim if nothing is locked."""
    return policy.victim(layer, layers_beside(layer), lambda _: False)


class Cache:
    """A cache of keys that asks a policy, as the placement of slots does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.resident: set[Key] = set()
        self.slots = list(GEOMETRY.slots_of_class)
        self.evicted: list[Key] = []
        self.now = 0

    def use(self, keys: list[Key], n_tokens: int = 1, *, own_layer_only: bool = False) -> None:
        """One `Need`: what it uses is locked against its own misses."""
        self.now += 1
        locked = {key for key in keys if key in self.resident}
        for key in keys:
            self.policy.touch(key, self.now, n_tokens)
        for key in keys:
            if key not in self.resident and self.make_room(key, locked, own_layer_only):
                self.policy.admit(key, self.now)
                self.resident.add(key)
                locked.add(key)

    def make_room(self, key: Key, locked: set[Key], own_layer_only: bool) -> bool:
        n_held = sum(1 for held in self.resident if class_of(held) == class_of(key))
        if n_held < self.slots[class_of(key)]:
            return True
        among = (key[0],) if own_layer_only else layers_beside(key[0])
        victim = self.policy.victim(key[0], among, locked.__contains__)
        candidates = {k for k in self.resident if k[0] in among} - locked
        if victim is None:
            assert candidates <= self.policy.hot, "a victim was to be had"
            return False
        assert victim in candidates, "not resident, of another layer, or locked"
        self.policy.forget(victim)
        self.resident.remove(victim)
        self.evicted.append(victim)
        return True


def some_keys(rng: random.Random) -> list[Key]:
    layer = rng.randrange(N_LAYERS)
    experts = rng.sample(range(N_EXPERTS), rng.randint(1, 4))
    return [(layer, expert) for expert in sorted(experts)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_the_contract(name: str, seed: int) -> None:
    """A victim is resident, of the class, not locked; there is one while one can go."""
    rng = random.Random(seed)
    cache = Cache(POLICIES[name]())
    for _ in range(400):
        cache.use(some_keys(rng), rng.choice([1, 1, 5]), own_layer_only=rng.random() < 0.1)
        if rng.random() < 0.05 and cache.resident:  # a read failed: gone without being a victim
            key = rng.choice(sorted(cache.resident))
            cache.policy.forget(key)
            cache.resident.remove(key)
        if rng.random() < 0.02:
            resize(cache, rng)


def resize(cache: Cache, rng: random.Random) -> None:
    """Other sizes; what does not fit any more has to go."""
    cache.slots = [rng.randint(3, 12) for _ in cache.slots]
    cache.policy.resize(tuple(cache.slots), cache.now)
    for slot_class, n_slots in enumerate(cache.slots):
        held = [key for key in cache.resident if class_of(key) == slot_class]
        while len(held) > n_slots:
            victim = anyone(cache.policy, held[0][0])
            victim = victim if victim is not None else held[0]
            assert victim in held
            cache.policy.forget(victim)
            held.remove(victim)
            cache.resident.remove(victim)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_uses_give_the_same_victims(name: str) -> None:
    caches = [Cache(POLICIES[name]()) for _ in range(2)]
    for cache in caches:
        rng = random.Random(7)
        for _ in range(300):
            cache.use(some_keys(rng))
    assert caches[0].evicted == caches[1].evicted != []


@pytest.mark.parametrize("name", POLICIES)
def test_no_victim_where_all_are_locked(name: str) -> None:
    policy = POLICIES[name]()
    for expert in range(3):
        policy.admit((0, expert), 1)
    assert policy.victim(0, (0, 2), lambda _: True) is None
    assert policy.victim(0, (2,), lambda _: False) is None  # nothing of this layer
    assert policy.victim(1, (1, 3), lambda _: False) is None


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_forgotten_is_no_victim(name: str) -> None:
    policy = POLICIES[name]()
    policy.forget((0, 3))  # never there: no error
    policy.admit((0, 2), 1)
    policy.admit((0, 3), 1)
    policy.forget((0, 2))
    assert anyone(policy, 0) == (0, 3)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    """Against one list in order of use."""
    rng = random.Random(1)
    cache = Cache(Lru(GEOMETRY))
    order: list[Key] = []
    expected: list[Key] = []
    for _ in range(500):
        keys = some_keys(rng)
        present = [key for key in keys if key in order]
        order = [key for key in order if key not in present] + present
        for key in keys:
            same = [held for held in order if class_of(held) == class_of(key)]
            if key in order:
                continue
            if len(same) == GEOMETRY.slots_of_class[class_of(key)]:
                expected.append(next(held for held in same if held not in keys))
                order.remove(expected[-1])
            order.append(key)
        cache.use(keys)
        assert cache.evicted == expected
    assert len(expected) > 100


def test_layer_lru_keeps_to_the_share_of_its_layer() -> None:
    """A scan over one layer does not push out the others."""
    cache = Cache(LayerLru(GEOMETRY))
    for key in [(2, expert) for expert in range(4)] + [(0, expert) for expert in range(N_EXPERTS)]:
        cache.use([key])
    before = {key for key in cache.resident if key[0] == 2}
    assert len(before) >= GEOMETRY.slots_of_class[0] // 2
    for expert in [*range(N_EXPERTS)] * 3:
        cache.use([(0, expert)])
    assert {key for key in cache.resident if key[0] == 2} == before
    assert len(cache.evicted) > 2 * N_EXPERTS


def test_lfu_counts_old_uses_half() -> None:
    """Against a sum of powers of two, one per use; a use by n tokens counts √n."""
    half_life = HALF_LIFE_TOKENS * N_LAYERS
    rng = random.Random(2)
    policy = Lfu(GEOMETRY)
    uses: dict[Key, list[tuple[int, int]]] = {(0, expert): [] for expert in range(N_EXPERTS)}
    for key in uses:
        policy.admit(key, 0)
    n_compared = 0
    for now in range(1, 4000):
        key = (0, min(N_EXPERTS - 1, int(rng.expovariate(0.6))))
        n_tokens = rng.choice([1, 1, 1, 9])
        policy.touch(key, now, n_tokens)
        uses[key].append((now, n_tokens))
        if now % 100 == 0 and all(uses.values()):
            weight = {
                k: sum(math.sqrt(n) * 2.0 ** ((at - now) / half_life) for at, n in own)
                for k, own in uses.items()
            }
            victim = anyone(policy, 2)
            assert victim is not None
            assert math.isclose(weight[victim], min(weight.values()), rel_tol=1e-9)
            n_compared += 1
    assert n_compared > 30


def test_lfu_remembers_who_was_evicted() -> None:
    policy = Lfu(GEOMETRY)
    for now in range(1, 10):
        policy.touch((0, 0), now, 1)
    policy.touch((0, 1), 11, 1)
    policy.touch((0, 2), 12, 1)  # so that neither was used by the last token
    policy.admit((0, 0), 12)
    policy.admit((0, 1), 12)
    assert anyone(policy, 0) == (0, 1)


def after_tokens(keep: float) -> Lfu:
    """Tokens of two experts out of six, each kept for the next token with some probability."""
    policy, rng = Lfu(GEOMETRY, n_active=2), random.Random(4)
    for expert in range(N_EXPERTS):
        policy.admit((0, expert), 0)
    used: set[int] = set()
    for token in range(1, 2000):
        used = {expert for expert in used if rng.random() < keep}
        while len(used) < 2:
            used.add(rng.randrange(N_EXPERTS))
        for expert in sorted(used):
            policy.touch((0, expert), token * N_LAYERS, 1)
    return policy


def test_where_tokens_repeat_the_last_one_counts_more() -> None:
    """Two uses, a while ago and in the last token, against four uses a while ago."""
    for keep, victim in ((0.0, (0, 5)), (0.8, (0, 4))):
        policy = after_tokens(keep)
        for expert in range(N_EXPERTS):
            policy.forget((0, expert))
        start = 4000 * N_LAYERS  # all before is forgotten by then
        for expert, n_uses in ((4, 4), (5, 1)):
            for _ in range(n_uses):
                policy.touch((0, expert), start, 1)
        policy.touch((0, 5), start + N_LAYERS, 1)
        for expert in (4, 5):
            policy.admit((0, expert), start + N_LAYERS)
        assert anyone(policy, 0) == victim
        policy.touch((0, 0), start + 2 * N_LAYERS, 1)
        assert anyone(policy, 0) == (0, 5), "one token later it is as any other"


def test_repeats_are_counted_beyond_what_was_foretold() -> None:
    repeats = Repeats(100)
    for number in range(50):
        repeats.add(is_repeat=number % 2 == 0, foretold=0.2)
    assert repeats.surplus == pytest.approx(0.3)
    for _ in range(2000):
        repeats.add(is_repeat=False, foretold=0.1)
    assert repeats.surplus == 0.0


def test_counts_of_other_texts_weigh_as_a_few_tokens() -> None:
    """They decide at first, and no more once this text has been heard."""
    policy = Lfu(GEOMETRY, {(0, 0): 900.0, (0, 1): 100.0}, n_active=2)
    policy.admit((0, 0), 0)
    policy.admit((0, 1), 0)
    assert anyone(policy, 0) == (0, 1)
    for now in range(1, 3 * SEED_TOKENS):
        policy.touch((0, 1), now, 1)
    assert anyone(policy, 0) == (0, 0)


def test_lfu_stays_small_and_finite_in_a_long_run() -> None:
    policy = Lfu(GEOMETRY)
    for expert in range(3):
        policy.admit((0, expert), 0)
    for now in range(1, 2_000_000, 400):
        policy.touch((0, now % 3), now, 1)
        assert anyone(policy, 0) is not None
    assert len(policy._heaps[0]) < 200


def test_slru_protects_what_was_used_twice() -> None:
    cache = Cache(Slru(GEOMETRY))
    for _ in range(2):
        cache.use([(0, 0), (0, 1)])
    for expert in (2, 3, 4, 5):
        cache.use([(0, expert)])
    for layer, expert in [(2, e) for e in range(N_EXPERTS)]:
        cache.use([(layer, expert)])
    assert {(0, 0), (0, 1)} <= cache.resident


def test_slru_leaves_room_for_newcomers() -> None:
    cache = Cache(Slru(GEOMETRY))
    limit = int(SLRU_PROTECTED_SHARE * GEOMETRY.slots_of_class[0])
    keys = [(0, expert) for expert in range(4)] + [(2, expert) for expert in range(3)]
    for _ in range(3):
        for key in keys:
            cache.use([key])
    cache.use([(2, 5)])
    assert cache.evicted[-1] in keys
    assert len(cache.resident & set(keys)) == len(keys) - 1 >= limit


def test_static_never_evicts_the_hot_set() -> None:
    policy = Static(GEOMETRY, USAGE, lambda n_slots: n_slots - 2)
    assert policy.hot == set(USAGE)  # they fit with two slots to spare in each class
    cache = Cache(policy)
    rng = random.Random(3)
    for key in sorted(USAGE):
        cache.use([key])
    for _ in range(300):
        cache.use(some_keys(rng))
    assert set(USAGE) <= cache.resident
    assert cache.evicted


@pytest.mark.parametrize(
    ("n_spare", "usage", "expected"),
    [
        (2, USAGE, {(0, 1), (2, 4), (1, 3)}),  # two of class 0, one of class 1
        (4, USAGE, set()),
        (2, {**USAGE, (99, 0): 9.0}, {(0, 1), (2, 4), (1, 3)}),  # a layer that is not there
    ],
)
def test_statics_hot_set_is_the_most_used_that_fit(
    n_spare: int, usage: Mapping[Key, float], expected: set[Key]
) -> None:
    small = PolicyGeometry(GEOMETRY.class_of_layer, (4, 3))
    assert Static(small, usage, lambda n_slots: n_slots - n_spare).hot == expected


def test_a_smaller_pool_has_a_smaller_hot_set() -> None:
    policy = Static(GEOMETRY, USAGE, lambda n_slots: n_slots - 2)
    for key in USAGE:
        policy.admit(key, 1)
    policy.resize((3, 9), 2)
    assert policy.hot == {(0, 1), (1, 3), (3, 0)}
    assert anyone(policy, 0) in {(2, 4), (0, 5)}


def test_where_only_the_hot_set_is_left_its_least_used_go() -> None:
    """Who else there was is adopted, which a policy does not hear of."""
    policy = Static(GEOMETRY, USAGE, lambda n_slots: n_slots - 2)
    for key in USAGE:
        policy.admit(key, 1)
    coldest = min((key for key in USAGE if class_of(key) == 0), key=lambda key: USAGE[key])
    assert anyone(policy, 0) == coldest
    assert policy.victim(0, layers_beside(0), lambda key: key == coldest) not in (None, coldest)
    assert policy.victim(0, layers_beside(0), lambda _: True) is None
    for expert in range(6, 10):  # now the hot set has its room again
        policy.admit((0, expert), 2)
    assert policy.victim(0, layers_beside(0), lambda key: key not in USAGE) is None


def test_calibrated_learns_from_the_first_tokens() -> None:
    cache = Cache(Calibrated(GEOMETRY, {}))
    favourites = [(0, 1), (0, 4), (2, 2)]
    assert not cache.policy.hot
    for _ in range(LEARNING_TOKENS):
        for layer in range(N_LAYERS):
            cache.use([key for key in favourites if key[0] == layer] or [(layer, 0)])
    cache.use([(1, 0)])
    assert set(favourites) <= cache.policy.hot
    assert len([k for k in cache.policy.hot if class_of(k) == 0]) <= CALIBRATED_SHARE * 7
    before = cache.policy.hot
    rng = random.Random(5)
    for _ in range(300):
        cache.use(some_keys(rng))
    assert cache.policy.hot == before
    assert set(favourites) <= cache.resident


def test_calibrated_with_counts_is_there_from_the_start() -> None:
    assert Calibrated(GEOMETRY, USAGE).hot == set(USAGE)
