"""Settings that are each legal and make no sense together: refused by name, before all else.

`given` holds the field names that the user typed, so that a default never counts as a wish. Rules
know nothing of the model and its memory; cores are the one thing of the machine they look at.
"""

import dataclasses
from collections.abc import Sequence

from coordinator.command.config import Config
from coordinator.command.cores import plan_cores
from coordinator.command.flag_values import ConfigError
from coordinator.command.flags import flags_of
from coordinator.command.sizes import format_size

PROMPTS = ("prompt", "prompt_file", "prompt_tokens")
# the page cache knows none of these
OF_THE_POOL = ("pool", "policy", "drop_cache", "read_unit", "hot_set", "imatrix", "experts_in")
COUNTS = ("usage", "hot_set", "imatrix")  # where counts of other texts come from
COUNTING_POLICIES = ("auto", "lfu", "static", "calibrated", "imatrix")
OF_ANSWERS = (  # without a prompt every request says its own
    "max_tokens", "stop", "ignore_eos", "temperature", "top_k", "top_p", "min_p", "repeat_penalty",
    "seed", "json", "csv",
)  # fmt: skip
OF_THE_SERVICE = (
    "host", "port", "api_key", "without_key", "allowed_hosts", "allowed_origins", "aliases",
    "parallel", "queue", "drain_seconds", "notify_socket",
)  # fmt: skip
INSIDE_COMPUTE = ("io_threads", "single_process")  # each puts the reading into the compute process


def combined(config: Config, given: frozenset[str], cores: Sequence[int]) -> Config:
    """The config with what one setting implies for another; raises `ConfigError` for a conflict.

    `cores` are those this process may use.
    """
    _check_prompts(given)
    _check_service(config, given)
    inside = [name for name in INSIDE_COMPUTE if name in given and getattr(config, name)]
    if inside and "io_workers" in given and config.io_workers > 0:
        flag = flag_name(inside[0])
        raise ConfigError(
            f"{flag}: expected --io-workers 0 with it, found --io-workers {config.io_workers}; "
            f"reading is done by processes or by the compute process: drop {flag} or --io-workers"
        )
    if inside:
        config = dataclasses.replace(config, io_workers=0)
    if "queue_depth" in given and config.io_workers == 0:
        raise ConfigError(
            "--queue-depth: expected I/O workers, found none; without them use --io-threads "
            "to have several reads in flight, or drop --queue-depth"
        )
    if config.single_process and config.session is not None:
        raise ConfigError(
            "--session: expected processes, found --single-process, which keeps no texts; drop one"
        )
    if config.single_process and config.metrics_port is not None:
        raise ConfigError(
            "--metrics-port: expected processes to watch, found --single-process; drop one of them"
        )
    if config.single_process and config.poll == "on":
        raise ConfigError(
            "--poll on: expected processes to wait for, found --single-process; drop one of them"
        )
    _check_memory(config)
    _check_counts(config, given)
    _check_experts_in(config, given)
    return _with_cores(_with_reader(config, given), given, cores)


def flag_name(field_name: str) -> str:
    """The long flag of a field of `Config`."""
    return next(flag.name for name, flag in flags_of(Config) if name == field_name)


def _check_prompts(given: frozenset[str]) -> None:
    named = [flag_name(name) for name in PROMPTS if name in given]
    if len(named) > 1:
        raise ConfigError(
            f"{named[0]}: expected one source of the prompt, found {' and '.join(named)}; keep one"
        )


def _check_service(config: Config, given: frozenset[str]) -> None:
    """A prompt is answered and that is all; without one there is a service."""
    wrong = OF_ANSWERS if config.is_service else OF_THE_SERVICE
    named = [flag_name(name) for name in wrong if name in given]
    if not named:
        return
    if config.is_service:
        raise ConfigError(
            f"{named[0]}: expected a prompt with it (-p, -f, --tokens), found none: in the service "
            f"every request says it for itself; give a prompt, or drop {named[0]}"
        )
    raise ConfigError(
        f"{named[0]}: expected no prompt with it, found one: a prompt is answered without a "
        f"service; drop the prompt or {named[0]}"
    )


def _check_memory(config: Config) -> None:
    pool = config.pool.n_bytes if config.pool is not None else None
    if pool is not None and config.memory_bytes is not None and pool > config.memory_bytes:
        raise ConfigError(
            f"--pool: expected less than --memory {format_size(config.memory_bytes)}, which holds "
            f"everything, found {format_size(pool)}; use a smaller --pool"
        )
    if config.dense == "mapped" and config.mlock == "require":
        raise ConfigError(
            "--mlock: expected weights in memory of our own, found --dense mapped, which leaves "
            "them to the page cache; drop --mlock or --dense"
        )


def _check_experts_in(config: Config, given: frozenset[str]) -> None:
    """Counts and traces are made of requests, which experts in compute's own memory need not."""
    named = [flag_name(name) for name in ("usage", "trace") if name in given]
    if config.experts_in == "own" and named:
        raise ConfigError(
            f"{named[0]}: expected --experts-in pool or auto with it, found own: compute asks for "
            f"nothing that it has, so nothing is counted; drop {named[0]} or --experts-in"
        )


def _check_counts(config: Config, given: frozenset[str]) -> None:
    """Counts of other texts come from one file, and from one that the policy makes use of."""
    named = [flag_name(name) for name in COUNTS if name in given]
    if len(named) > 1:
        raise ConfigError(
            f"{named[0]}: expected one file with counts, found {' and '.join(named)}; keep one"
        )
    policy = config.policy
    if policy == "static" and not named:
        raise ConfigError(
            "--policy: expected counts for static, found none; give --hot-set FILE, which "
            "`moe-coord calibrate` writes, or --usage FILE"
        )
    if policy == "imatrix" and config.imatrix is None:
        raise ConfigError(
            "--policy: expected --imatrix FILE with imatrix, found none; give the file, or another "
            "--policy"
        )
    if named and named != ["--usage"] and policy not in COUNTING_POLICIES:
        raise ConfigError(
            f"{named[0]}: expected a policy that counts ({', '.join(COUNTING_POLICIES)}), found "
            f"{policy}, which would not look at it; drop {named[0]} or --policy"
        )


def _with_reader(config: Config, given: frozenset[str]) -> Config:
    """Where the page cache keeps the experts there is nothing to choose about a pool."""
    if config.has_pool:
        return config
    for name in OF_THE_POOL:
        if name in given:
            flag = flag_name(name)
            raise ConfigError(
                f"{flag}: expected a reader that fills a pool (auto, direct, buffered), found "
                f"--reader {config.reader}, which leaves the experts to the page cache; drop "
                f"{flag} or --reader"
            )
    if config.only_faults and config.prefetch not in ("auto", "off"):
        raise ConfigError(
            "--prefetch: expected something that reads, found --reader mmap in compute itself, "
            "which only faults; use --io-workers 1, or drop --prefetch"
        )
    if config.reader != "mmap":
        return config
    for name in ("queue_depth", "io_threads"):
        found = getattr(config, name)
        if name in given and found > 1:
            raise ConfigError(
                f"{flag_name(name)}: expected 1 with --reader mmap (a process touches one page at "
                f"a time, however many threads it has), found {found}; use more --io-workers"
            )
    return dataclasses.replace(config, queue_depth=1)


def _with_cores(config: Config, given: frozenset[str], cores: Sequence[int]) -> Config:
    if config.core_plan is None and not config.pin_cores:
        return config
    plan = plan_cores(config.core_plan, cores)
    n_threads = config.compute_threads
    if n_threads is not None and n_threads > plan.compute_threads:
        raise ConfigError(
            f"--compute-threads: expected at most {plan.compute_threads} (the compute cores of the "
            f"plan {plan.name!r}), found {n_threads}; threads that wait for each other cannot "
            "share a core: use fewer, or another --core-plan"
        )
    return dataclasses.replace(config, pin_cores=True)
