"""The two sides of kept KV blocks agree: the core counts them, a model of compute holds them."""

import random
from dataclasses import dataclass, field

from simulation import Engine, done, engine

from coordinator.core.schedule import Schedule
from coordinator.core.state import ComputeDied, Continue, EndRequest, FromCompute, NewRequest
from shm.messages import Finished, Forget, Sampled, Sampling, Step, Submit

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 1)
N_LAYERS, BLOCK = 8, 64


@dataclass
class ComputeModel:
    """Blocks as the compute process has them: users of each, and the tokens that are in it."""

    n_blocks: int
    users: dict[int, int] = field(default_factory=dict)
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)  # all up to its end
    tables: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    n_taken_over: int = 0

    def receive(self, message: object) -> None:
        """What the core says, in order."""
        match message:
            case Submit():
                blocks = []
                if message.prefix_of is not None:
                    blocks = self.kept[message.prefix_of][: message.n_prefix_blocks]
                for number, block in enumerate(blocks):
                    assert self.content[block] == message.prompt[: (number + 1) * BLOCK]
                    self.users[block] += 1
                self.n_taken_over += len(blocks)
                self.tables[message.request] = list(blocks)
                self.tokens[message.request] = list(message.prompt)
            case Finished(request, _, n_kept):
                blocks = self.tables.pop(request)
                del self.tokens[request]
                if n_kept:
                    self.kept[request] = blocks[:n_kept]
                self.free(blocks[n_kept:])
            case Forget(request):
                self.free(self.kept.pop(request))
            case Step():
                for part in message.slices:
                    self.extend(part.request, part.start, part.start + part.n_tokens)

    def extend(self, request: int, start: int, stop: int) -> None:
        """A step writes these tokens."""
        table, tokens = self.tables[request], self.tokens[request]
        assert start >= 0 and all(self.users[block] == 1 for block in table[start // BLOCK :])
        while len(table) * BLOCK < stop:
            block = next(n for n in range(self.n_blocks) if n not in self.users)
            self.users[block] = 1
            table.append(block)
        for number in range(start // BLOCK, stop // BLOCK):
            self.content[table[number]] = tuple(tokens[: (number + 1) * BLOCK])

    def free(self, blocks: list[int]) -> None:
        """One user less of each."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]


def some_prompt(rng: random.Random) -> tuple[int, ...]:
    """One of a few beginnings, and an end of its own."""
    beginning = [rng.randrange(3)] * rng.choice([0, 70, 130, 200])
    return (*beginning, *(rng.randrange(100) for _ in range(rng.randint(1, 90))))


def turn(run: Engine, model: ComputeModel, rng: random.Random) -> None:
    """One step, or nothing if none can run."""
    run.handle(Continue())
    deliver(run, model)
    step = run.core.requests.running_step
    if step is None:
        return
    if rng.random() < 0.1:  # in the middle of it
        run.handle(EndRequest(rng.randrange(40), rng.choice(["cancelled", "stop"])))
        deliver(run, model)
    drawn = [Sampled(p.request, rng.randrange(100), -1.0) for p in step.slices if p.sample]
    for token in drawn:
        if token.request in model.tokens:
            model.tokens[token.request].append(token.token)
    run.handle(FromCompute(done(step.step, (), tuple(drawn))))
    deliver(run, model)
    run.core.check()


def deliver(run: Engine, model: ComputeModel) -> None:
    inbox = list(run.inbox)
    run.inbox.clear()
    for message in inbox:
        model.receive(message)


def test_random_conversations_share_blocks_within_the_quota() -> None:
    n_taken_over = 0
    for seed in range(25):
        rng = random.Random(seed)
        schedule = Schedule(N_LAYERS, 64, rng.randint(1, 4), 8, keeps_prefixes=True)
        run, model = engine(N_LAYERS, 4, 4, schedule=schedule), ComputeModel(8)
        pending = list(range(40))
        while pending or not run.core.requests.is_idle:
            if pending and rng.random() < 0.4:
                submit = Submit(pending.pop(), some_prompt(rng), GREEDY, 400, False)
                run.handle(NewRequest(submit, rng.randint(1, 90), frozenset({99})))
            turn(run, model, rng)
            if rng.random() < 0.01:
                run.handle(ComputeDied("gone"))
                run.inbox.clear()
                model = ComputeModel(8, n_taken_over=model.n_taken_over)
        deliver(run, model)
        assert sorted(ended.request for ended in run.ended) == list(range(40))
        assert len(model.users) == run.core.requests.n_kept_blocks
        assert set(model.users.values()) <= {n + 1 for n in range(len(model.kept))}
        n_taken_over += model.n_taken_over
    assert n_taken_over > 100


def test_one_that_leaves_does_not_end_the_step_of_others() -> None:
    schedule = Schedule(N_LAYERS, 64, 4, 8)
    run = engine(N_LAYERS, 4, 4, schedule=schedule)
    for request in (1, 2):
        run.handle(NewRequest(Submit(request, (1, 2, 3), GREEDY, 400, False), 9, frozenset()))
        run.handle(Continue())
    for _ in range(6):  # both are in their answer
        step = run.core.requests.running_step
        assert step is not None
        drawn = tuple(Sampled(p.request, 5, -1.0) for p in step.slices if p.sample)
        run.handle(FromCompute(done(step.step, (), drawn)))
        run.handle(Continue())
    step = run.core.requests.running_step
    assert step is not None and len(step.slices) == 2
    assert run.handle(EndRequest(1, "cancelled")) == []
    assert len(run.handle(EndRequest(2, "cancelled"))) == 1  # now nobody waits for it
