"""The rules of structure that the source must keep, read from its syntax trees."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import shm

ROOT = Path(shm.__file__).parent.parent
PACKAGES = ("shm", "io_worker", "compute_worker", "coordinator")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
)
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 300, 60
MAY_BE_LONGER = {"shm.messages": 480}  # one file declares them all, with who answers whom
MAY_IMPORT_IN_TRY = {
    "compute_worker.native_kernels",  # an install without a compiler has none
    "coordinator.fetch_model",  # an install without the extra
    "coordinator.bench.report.__main__",  # an optional extra
    "coordinator.bench_ray",  # an optional extra
}

MAY_IMPORT = {
    "shm": {"shm"},
    "io_worker": {"io_worker", "shm"},
    "compute_worker": {"compute_worker", "io_worker", "shm"},
}
# what the coordinator may use of the workers: modules that load neither numpy nor kernels
LEAVES = {
    "compute_worker.arch",
    "compute_worker.model_checks",
    "compute_worker.native_types",
    "compute_worker.settings",
    "io_worker.ggml_types",
    "io_worker.gguf_header",
    "io_worker.gguf_metadata",
    "io_worker.model_bytes",
    "io_worker.model_file",
    "io_worker.model_units",
    "io_worker.packed_layout",
    "io_worker.page_cache",
    "io_worker.probe",
    "io_worker.reader",
    "io_worker.reader_trial",
    "io_worker.settings",
    "io_worker.slab_reader",
    "io_worker.slabs",
}
# What each group of the coordinator may import of the others, from the lowest to the highest. Above
# them stand the entries, the modules directly in `coordinator`: no group imports them.
GROUPS: dict[str, set[str]] = {
    "core": set(),
    "command": {"core"},
    "text": set(),
    "routing": {"core", "command"},
    "processes": {"core", "command"},
    "plan": {"core", "command", "routing", "processes"},
    "models": {"core", "command", "processes", "plan"},
    "metrics": {"core", "command", "processes", "plan"},
    "api": {"text", "processes", "metrics"},
    "bench": {"command", "processes", "plan", "models"},
    "bench.report": {"core", "command", "routing", "bench"},
    "serving": {
        "core", "command", "text", "routing", "processes", "plan", "metrics", "api",
    },
}  # fmt: skip
# the decision core reads no clock, draws no random number and opens nothing
CORE_LIBRARIES = {
    "collections", "dataclasses", "enum", "fractions", "heapq", "math", "statistics", "typing",
}  # fmt: skip
# Processes of their own, reached by a clean exec: what fetches a model, the service that a chat
# starts, the drawing of reports, a Ray driver, and the decision core inside the compute process
# with its link. Nothing else may import them.
OWN_PROCESSES = {
    "coordinator.bench_ray",
    "coordinator.processes.core_link",
    "coordinator.fetch_model",
    "coordinator.own_service",
    "coordinator.bench.report.__main__",
    "coordinator.single_process",
}

# library -> the only modules that may import it
ONLY_IN = {
    "zmq": {
        "compute_worker.__main__",
        "coordinator.api.__main__",
        "coordinator.processes.children",
        "coordinator.processes.launch",
        "io_worker.__main__",
        "shm.link",
    },
    "subprocess": {
        "coordinator.bench.llama_server",
        "coordinator.processes.program",
        "coordinator.processes.launch",
    },
    "rich": {
        "coordinator.models.map",
        "coordinator.command.tables",
        "coordinator.command.terminal",
        "coordinator.serving.top",
        "coordinator.serving.top_view",
        "coordinator.routing.trace_report",
    },
    "prometheus_client": {"coordinator.metrics.exposition"},
    "msgpack": {"shm.codec"},
    "psutil": {"coordinator.metrics.exposition"},
    "cffi": {"compute_worker.native.build_native"},
    "gguf": {
        "compute_worker.matrix",
        "compute_worker.native_kernels",
        "compute_worker.reference",
        "coordinator.models.synth_blocks",
    },
    "tokenizers": {"coordinator.text.tokenizer"},
    "jinja2": {"coordinator.api.render"},
    "uvicorn": {"coordinator.api.__main__", "coordinator.api.protocol"},
    "vl_convert": {"coordinator.bench.report.__main__"},
    "ray": {"coordinator.bench_ray"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "multiprocessing": set(),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "fork"}
# the environment of a child is made from ours; nothing reads a setting from it
MAY_PASS_ENVIRONMENT = {"coordinator.__main__", "coordinator.processes.launch"}


@cache
def source_of(module: str) -> str:
    return (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module))


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """Full names of what a module imports, ours down to the module."""
    found: list[str] = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module}: relative import"
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in deeper if name in MODULES] or [node.module]
    return tuple(found)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def where(module: str, node: ast.AST) -> str:
    return f"{module}:{getattr(node, 'lineno', '?')}"


def test_the_walk_sees_the_source() -> None:
    assert {f"{package}.__init__" for package in PACKAGES} <= set(MODULES)
    assert "shm.pool" in set(imports_of("io_worker.__main__"))
    assert "numpy" in set(imports_of("compute_worker.forward"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    package = package_of(module)
    ours = {name for name in imports_of(module) if package_of(name) in PACKAGES}
    if package != "coordinator":
        wrong = {name for name in ours if package_of(name) not in MAY_IMPORT[package]}
    elif module in OWN_PROCESSES:
        wrong = set()
    else:
        allowed = {name for name in ours if package_of(name) in ("coordinator", "shm")}
        wrong = ours - allowed - LEAVES
        wrong |= ours & OWN_PROCESSES
    assert not wrong, f"{module} imports {sorted(wrong)}"


def group_of(module: str) -> str:
    """Of a module of the coordinator; "" for an entry."""
    return module.removeprefix("coordinator").rpartition(".")[0].removeprefix(".")


def test_groups_of_the_coordinator_import_one_way() -> None:
    names = list(GROUPS)
    assert all(GROUPS[name] <= set(names[:place]) for place, name in enumerate(names))
    assert {group_of(m) for m in MODULES if package_of(m) == "coordinator"} == {*names, ""}
    for module in MODULES:
        group = group_of(module)
        if package_of(module) != "coordinator" or not group:
            continue
        used = {group_of(name) for name in imports_of(module) if package_of(name) == "coordinator"}
        assert used <= GROUPS[group] | {group}, f"{module} imports {sorted(used - GROUPS[group])}"


def test_the_core_is_pure() -> None:
    for module in MODULES:
        if module.startswith("coordinator.core."):
            libraries = {package_of(name) for name in imports_of(module)} - set(PACKAGES)
            assert libraries <= CORE_LIBRARIES, module
            names = {node.id for node in ast.walk(tree_of(module)) if isinstance(node, ast.Name)}
            assert not names & {"open", "print", "input"}, module


def test_the_wheel_has_every_package() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(described["tool"]["setuptools"]["packages"]) == {
        m.rpartition(".")[0] for m in MODULES
    }


@pytest.mark.parametrize("module", sorted(LEAVES | {"coordinator.__main__"}))
def test_numpy_is_not_reached(module: str) -> None:
    """Through all imports of imports."""
    seen, left = set(), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            left += imports_of(name)
    assert not {name for name in seen if package_of(name) in ("numpy", "gguf")}


def test_io_workers_and_shm_never_import_numpy() -> None:
    for module in MODULES:
        if package_of(module) in ("shm", "io_worker"):
            libraries = {package_of(name) for name in imports_of(module)}
            assert not libraries & {"numpy", "gguf"}, module


def test_web_libraries_stay_in_the_http_process() -> None:
    """They cost memory and time to load, which the other processes need not spend."""
    found = {
        m for m in MODULES if {"starlette", "uvicorn"} & {package_of(i) for i in imports_of(m)}
    }
    assert {m.rpartition(".")[0] for m in found} == {"coordinator.api"}
    seen, left = set(), ["coordinator.__main__"]
    while left:
        name = left.pop()
        if name not in seen and name in MODULES:
            seen.add(name)
            left += imports_of(name)
    assert not seen & found


@pytest.mark.parametrize("library", ONLY_IN)
def test_libraries_stay_where_they_belong(library: str) -> None:
    found = {m for m in MODULES if library in {package_of(name) for name in imports_of(m)}}
    assert found <= ONLY_IN[library]


@pytest.mark.parametrize("module", MODULES)
def test_imports_stand_at_the_top(module: str) -> None:
    top = list(tree_of(module).body)
    if module in MAY_IMPORT_IN_TRY:
        top += [line for node in top if isinstance(node, ast.Try) for line in node.body]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert any(node is found for found in top), f"{where(module, node)}: late import"
        assert not (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"), module


@pytest.mark.parametrize("module", MODULES)
def test_sizes(module: str) -> None:
    n_lines = len(source_of(module).splitlines())
    limit = MAY_BE_LONGER.get(module, MAX_MODULE_LINES)
    assert n_lines <= limit, f"{module}: {n_lines} lines"
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            n_lines = node.end_lineno - node.lineno + 1
            assert n_lines <= MAX_FUNCTION_LINES, f"{where(module, node)}: {n_lines} lines"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_runs_what_it_reads(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_regex = isinstance(node.func, ast.Attribute) and name == "compile"
        assert name not in FORBIDDEN_CALLS or is_regex, f"{where(module, node)}: {name}"
        for keyword in node.keywords:
            assert keyword.arg != "allow_pickle", where(module, node)
            is_shell = keyword.arg == "shell" and getattr(keyword.value, "value", None) is not False
            assert not is_shell, f"{where(module, node)}: shell"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_reads_the_environment(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        name = getattr(node, "attr", getattr(node, "id", ""))
        assert name not in ("getenv", "expandvars", "environb"), where(module, node)
        if name == "environ":
            assert module in MAY_PASS_ENVIRONMENT, where(module, node)
    if module in MAY_PASS_ENVIRONMENT:  # only as {**os.environ, …}
        n_uses = source_of(module).count("os.environ")
        assert n_uses == source_of(module).count("**os.environ"), module


@pytest.mark.parametrize("module", MODULES)
def test_no_error_is_swallowed(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in (
                "Exception",
                "BaseException",
            )
            silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            assert not (broad and silent), f"{where(module, node)}: swallows everything"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress":
            names = {getattr(argument, "id", "") for argument in node.args}
            assert not names & {"Exception", "BaseException"}, where(module, node)


def test_the_coordinator_loads_without_numpy() -> None:
    """numpy costs memory that the experts could have, and reads its thread count at import."""
    program = (
        "import sys, coordinator.__main__; "
        "print(*[m for m in ('numpy', 'gguf', 'cffi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []
