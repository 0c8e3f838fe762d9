"""The status of a service as text for a terminal (its shape: `coordinator.serving.status`).

Pure: from one status, the one before it and the size of the terminal to lines. Everything that the
service says is text, never markup.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from coordinator.command.sizes import format_size

Status = Mapping[str, Any]
PARTS = {"compute": "blue", "disk": "yellow", "coordination": "magenta"}
STATES = {"ready": "green", "starting": "yellow", "degraded": "yellow", "draining": "yellow"}
LETTERS = ".lr"  # of less to more to tell: a cell that stands for several shows the last of these
LOADING = "#d98a1f"
RESIDENT = ("#24425f", "#2f6fbf", "#9cc6fb")  # from unused to much used
ON_DISK = ("#22272e", "#39424d", "#5a6675")
BAR_CELLS = 40
MARGIN = 5  # for the numbers of the layers


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier look: processor seconds by process, and when."""

    cpu_seconds: Mapping[str, float | None]
    at_seconds: float


def one_line(status: Status) -> str:
    """The most important in one line."""
    recent, requests = status["recent"], status["requests"]
    return (
        f"{status['state']}; {recent['tokens_per_second']:.1f} tokens/s; hit rate "
        f"{_percent(recent['hit_rate'])}; {_mib(recent['mib_per_token'])}; "
        f"{requests['running']} of {requests['parallel']} running, {requests['queued']} waiting"
    )


def view(
    status: Status,
    url: str,
    earlier: Earlier | None,
    now_seconds: float,
    size: tuple[int, int],
    *,
    has_colour: bool,
) -> Text:
    """All of it for `size` columns × rows; the map of the experts takes the rows that are left."""
    width, height = size
    above = [*_head(status, url), Text(), *_figures(status), _time(status["recent"], width), Text()]
    below = [
        Text(),
        *_slots(status["slots"]),
        *_memory(status["memory"]),
        Text(),
        *_processes(status["processes"], earlier, now_seconds),
        *_requests(status["requests"]),
    ]
    room = max(4, height - len(above) - len(below) - 2)
    lines = [*above, *_experts(status["experts"], width, room, has_colour=has_colour), *below]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _head(status: Status, url: str) -> Iterator[Text]:
    model, settings, state = status["model"], status["settings"], status["state"]
    yield Text.assemble(
        (model["name"], "bold"),
        " ",
        (f"● {state}", STATES.get(state, "red")),
        f" for {_span(status['uptime_seconds'])} at {url}",
    )
    reads = f"{settings['io_workers']} I/O worker(s)"
    if not settings["io_workers"]:
        reads = f"{settings['io_threads']} I/O thread(s)" if settings["io_threads"] else "inline"
    yield Text(
        f"{model['architecture']}, {model['n_layers']} layers × {model['n_experts']} experts, "
        f"{model['n_active']} per token; context {model['n_context']}; {reads}, "
        f"{settings['reader']}, {settings['policy']}, {settings['numerics']}, "
        f"{settings['kernels'] or 'kernels not known yet'}",
        style="dim",
    )


def _figures(status: Status) -> Iterator[Text]:
    recent, totals = status["recent"], status["totals"]
    hits, asked = totals["expert_hits"], totals["expert_requests"]
    overall = hits / asked if hits is not None and asked else None
    yield Text.assemble(
        (f"{recent['tokens_per_second']:.1f}", "bold"), " tokens/s   ",
        (_percent(recent["hit_rate"]), "bold"), " hit rate   ",
        (_mib(recent["mib_per_token"]), "bold"), " read",
    )  # fmt: skip
    yield Text(
        f"prompts {recent['prompt_tokens_per_second']:.1f} tokens/s; since the start: "
        f"{totals['generated_tokens']} tokens, hit rate {_percent(overall)}, "
        f"{format_size(totals['bytes_read'])} read, {totals['evictions']} evictions",
        style="dim",
    )


def _time(recent: Status, width: int) -> Text:
    parts = recent["token_seconds"]
    if parts is None:
        return Text("time per token: no token lately", style="dim")
    line = Text("time per token ")
    for name, colour in PARTS.items():
        line.append(f"{name} {1e3 * parts[name]:.1f} ms  ", style=colour)
    bar = _bar([(parts[name], colour) for name, colour in PARTS.items()], BAR_CELLS)
    return line.append_text(bar) if len(line) + BAR_CELLS <= width else line


def _experts(experts: Status | None, width: int, room: int, *, has_colour: bool) -> list[Text]:
    """A row of cells per layer, or per group of layers where there is no room for all."""
    if experts is None:
        return [Text("the page cache holds the experts: the kernel decides which", style="dim")]
    states, uses = experts["states"], experts["uses"]
    n_layers, n_experts = len(states), len(states[0])
    layers_a_row = -(-n_layers // max(1, room - 1))
    experts_a_cell = -(-n_experts // max(1, width - MARGIN))
    cells = 2 if (width - MARGIN) // n_experts >= 2 else 1
    most = max(1, max(map(max, uses)))
    everywhere = "".join(states)
    group = f", {layers_a_row} × {experts_a_cell} to a cell" * (layers_a_row * experts_a_cell > 1)
    title = (
        f"experts: {everywhere.count('r')} of {len(everywhere)} resident, "
        f"{everywhere.count('l')} loading{group}"
    )
    legend = Text(title)
    if has_colour:
        legend.append("  █", style=RESIDENT[1]).append(" resident  ")
        legend.append("█", style=ON_DISK[2]).append(" on the disk  ")
        legend.append("█", style=LOADING).append(" loading; brighter: used more")
    else:
        legend.append("  r resident, . on the disk, l loading")
    lines = [legend]
    for top in range(0, n_layers, layers_a_row):
        rows = range(top, min(n_layers, top + layers_a_row))
        line = Text(f"{experts['layers'][top]:>{MARGIN - 1}} ", style="dim")
        for left in range(0, n_experts, experts_a_cell):
            columns = range(left, min(n_experts, left + experts_a_cell))
            letter = max((states[r][c] for r in rows for c in columns), key=LETTERS.index)
            share = max(uses[r][c] for r in rows for c in columns) / most
            if has_colour:
                line.append("█" * cells, style=_shade(letter, share))
            else:
                line.append(letter * cells)
        lines.append(line)
    return lines


def _shade(letter: str, share: float) -> str:
    """Hue: where it is; brightness: the root of its share of uses."""
    if letter == "l":
        return LOADING
    ramp = RESIDENT if letter == "r" else ON_DISK
    place = share**0.5 * (len(ramp) - 1)
    low = min(int(place), len(ramp) - 2)
    pairs = zip(_rgb(ramp[low]), _rgb(ramp[low + 1]), strict=True)
    mixed = [round(a + (place - low) * (b - a)) for a, b in pairs]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _slots(classes: Sequence[Status]) -> Iterator[Text]:
    for found in classes:
        loading = found["loading"] + found["condemned"]
        states = [f"{found['ready']} ready", f"{loading} loading", f"{found['free']} free"]
        if found["retired"]:
            states.append(f"{found['retired']} given back")
        size = format_size(found["slot_bytes"])
        yield Text(f"slots of {size}: {', '.join(states)}; {len(found['layers'])} layers")


def _memory(memory: Status) -> Iterator[Text]:
    accounted, budget = memory["accounted_bytes"], memory["budget_bytes"]
    share = accounted / budget if budget else 0.0
    line = Text(
        f"memory {format_size(accounted)} of {format_size(budget)} (highest "
        f"{format_size(memory['peak_bytes'])}) "
    )
    colour = "green" if share < 0.97 else "red"
    yield line.append_text(_bar([(share, colour), (max(0.0, 1 - share), "bright_black")], 20))


def _processes(
    processes: Sequence[Status], earlier: Earlier | None, now_seconds: float
) -> Iterator[Text]:
    yield Text(f"{'process':<12}{'cores':>8}{'busy':>8}{'memory':>12}{'restarts':>10}", style="dim")
    for process in processes:
        name, restarts = process["name"], process["restarts"]
        cores = ",".join(map(str, process["cores"]))
        if not process["is_up"]:
            state = "down" if process["pid"] is None else "starts"
            yield Text(f"{name:<12}{cores:>8}{state:>20}{restarts:>10}", style="red")
            continue
        before = earlier.cpu_seconds.get(name) if earlier is not None else None
        busy = "–"
        if earlier is not None and before is not None and process["cpu_seconds"] is not None:
            seconds = max(1e-9, now_seconds - earlier.at_seconds)
            busy = f"{max(0.0, 100 * (process['cpu_seconds'] - before) / seconds):.0f} %"
        memory = format_size(process["resident_bytes"] or 0)
        yield Text(f"{name:<12}{cores:>8}{busy:>8}{memory:>12}{restarts:>10}")


def _requests(requests: Status) -> Iterator[Text]:
    yield Text()
    yield Text(
        f"requests: {requests['running']} of {requests['parallel']} running, "
        f"{requests['queued']} of {requests['queue']} waiting"
    )
    for request in requests["list"][:8]:
        done, n_prompt = request["done_tokens"], request["prompt_tokens"]
        yield Text(
            f"  {request['phase']:<7} prompt {done}/{n_prompt}, {request['tokens']} tokens, "
            f"{_span(request['seconds'])}",
            style="dim",
        )


def _bar(parts: Sequence[tuple[float, str]], n_cells: int) -> Text:
    total = sum(amount for amount, _ in parts) or 1.0
    bar, done, at = Text(), 0.0, 0
    for (amount, colour), shade in zip(parts, "█░▒", strict=False):  # told apart without colours
        done += amount
        end = round(n_cells * done / total)
        bar.append(shade * (end - at), style=colour)
        at = end
    return bar


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _mib(value: float | None) -> str:
    return "– MiB/token" if value is None else f"{value:.2f} MiB/token"


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
