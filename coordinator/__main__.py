"""Entry of ``moe-coord``: parse, do what was asked, make every error one line and an exit code.

0 done, 2 configuration, 3 model file, 4 resources, 5 internal, 130 and 143 signals.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from coordinator.bench.bench import run_bench
from coordinator.bench.capped import run_capped
from coordinator.bench.ceiling import run_ceiling
from coordinator.command.bench_commands import BenchCommand, CappedCommand, CeilingCommand
from coordinator.command.client_commands import ChatCommand, TopCommand
from coordinator.command.commands import (
    Command,
    CompletionCommand,
    EvalCommand,
    HelpCommand,
    MapCommand,
    PackCommand,
    PlanCommand,
    SynthCommand,
    VerifyCommand,
)
from coordinator.command.completion import completion_script
from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse
from coordinator.command.streams import (
    OutputError,
    lasting_errors,
    let_output_go,
    open_missing_streams,
)
from coordinator.command.topics import topic_text
from coordinator.command.trace_commands import ReplayCommand, TraceCommand
from coordinator.core.slot_classes import PoolTooSmallError
from coordinator.models.map import show_map
from coordinator.models.named_model import located
from coordinator.models.pack import run_pack
from coordinator.models.synth import run_synth
from coordinator.models.verify import run_verify
from coordinator.plan.plan import run_plan
from coordinator.processes.engine import EngineError
from coordinator.processes.launch import ONE_THREAD
from coordinator.processes.limits import ResourceError
from coordinator.routing.replay_report import show_replay
from coordinator.routing.trace_report import show_trace
from coordinator.serving.evaluate import evaluate
from coordinator.serving.generate import generate
from coordinator.serving.runner import Running, running
from coordinator.serving.service import serve
from coordinator.serving.service_client import ServiceError
from coordinator.serving.terminal_chat import run_chat
from coordinator.serving.top import run_top
from coordinator.text.tokenizer import TokenizerError
from io_worker.gguf_header import ModelFormatError
from io_worker.reader import ModelFileError
from shm.garbage import look_seldom
from shm.link import LinkError
from shm.pool import PoolError

EXIT_CODES: dict[type[Exception], int] = {
    ConfigError: 2,
    PoolTooSmallError: 2,
    ModelFormatError: 3,
    ModelFileError: 3,
    TokenizerError: 3,
    ResourceError: 4,
    PoolError: 4,
    LinkError: 4,
    ServiceError: 4,
    MemoryError: 4,
    OutputError: 4,
    OSError: 4,
}
EXIT_INTERNAL = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    look_seldom()
    typed = sys.argv[1:] if arguments is None else arguments
    return reported(lambda: dispatch(located(parse(typed), typed), typed))


def reported(job: Callable[[], int]) -> int:
    """Run a job; its errors become one line on standard error and an exit code."""
    open_missing_streams()
    if sys.stderr is sys.__stderr__:  # who read it may go: lines for people are then for nobody
        sys.stderr = lasting_errors()
    try:
        code = job()
        sys.stdout.flush()  # here, where a reader that went away is expected
        return code
    except BrokenPipeError:
        let_output_go()
        return 0
    except EngineError as error:
        return _say(str(error), error.exit_code)
    except tuple(EXIT_CODES) as error:
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        return _say(str(error), code)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a fault of ours: with all that helps to find it
        traceback.print_exc()
        return _say(f"internal: {type(error).__name__}: {error}; please report it", EXIT_INTERNAL)


def dispatch(command: Command, typed: Sequence[str]) -> int:
    """Do what was asked."""
    match command:
        case Config(single_process=True):
            _become(["coordinator.single_process", *typed])
        case EvalCommand(config) if config.single_process:
            _become(["coordinator.single_process", *typed])
        case Config(is_service=True):
            return serve(command)
        case Config() | EvalCommand():
            return run_engine(command, running)
        case PlanCommand():
            return run_plan(command)
        case MapCommand():
            show_map(command, sys.stdout)
            return 0
        case SynthCommand():
            run_synth(command)
            return 0
        case PackCommand():
            return run_pack(command)
        case VerifyCommand():
            return run_verify(command)
        case BenchCommand(ray=str()):
            _become(["coordinator.bench_ray", *typed])
        case BenchCommand():
            return run_bench(command)
        case CappedCommand():
            return run_capped(command)
        case CeilingCommand():
            return run_ceiling(command)
        case TraceCommand():
            show_trace(command, sys.stdout)
            return 0
        case ReplayCommand():
            show_replay(command, sys.stdout)
            return 0
        case TopCommand():
            return run_top(command)
        case ChatCommand():
            return run_chat(command)
        case HelpCommand(topic):
            print(topic_text(topic))
            return 0
        case CompletionCommand(shell):
            print(completion_script(shell))
            return 0
    raise AssertionError(f"no rule for {command!r}")


def run_engine(command: Config | EvalCommand, running: Running) -> int:
    """A job that needs the engine."""
    if isinstance(command, EvalCommand):
        return evaluate(command, running)
    return generate(command, running)


def _become(module: Sequence[str]) -> NoReturn:
    """Numerical libraries read their thread counts when they are loaded: a clean exec sets them."""
    command = [sys.executable, "-P", "-m", *module]
    os.execve(sys.executable, command, {**os.environ, **ONE_THREAD})


def _say(text: str, code: int) -> int:
    print(f"moe-coord: error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
