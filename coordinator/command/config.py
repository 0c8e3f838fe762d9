"""Every setting of the main job, each declared once.

Flag, kind of value, default, help, group and metavar come from the field. An "auto" becomes a value
in `resolve`; combinations are judged in `combinations`. Nothing here reads the environment or opens
a file.

Rule to keep: a value is offered only if the program honours it.
"""

from dataclasses import dataclass
from pathlib import Path

from coordinator.command.cores import PLAN_EXAMPLES, PLAN_NAMES
from coordinator.command.flag_values import (
    PATH,
    POOL,
    PORT,
    SEED,
    SIZE,
    STOP,
    TEXT,
    TOKEN_IDS,
    ConfigError,
    Kind,
    choice,
    integer,
    real,
)
from coordinator.command.flags import flag
from coordinator.command.sizes import PoolSize
from coordinator.core.policy_choice import POLICIES
from io_worker.page_cache import WARMERS
from io_worker.probe import READER_NAMES

__all__ = ["Config", "ConfigError", "shipped_model"]

INPUT, SAMPLING = "input", "how tokens are drawn"
PROCESSES, READING = "processes and cores", "reading experts"
MEMORY, COMPUTE = "memory", "arithmetic"
OUTPUT, SERVICE = "output", "service"


def shipped_model() -> Path:
    """The small model inside the package, used where no model is named."""
    return Path(__file__).parent.parent / "demo" / "moe-demo-q4_k_m.gguf"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the main job. None means "auto" or "not given" until `resolve` has run."""

    model: Path = flag(
        shipped_model(), "-m --model", PATH, INPUT,
        "GGUF file, the first part of a split one, or a name: hf:OWNER/REPO:Q4_K_M (fetched if it "
        "is not in the cache), ollama:NAME:TAG", default_text="the model that ships with it",
    )  # fmt: skip
    model_cache: Path | None = flag(
        None, "--model-cache", PATH, INPUT, "folder where named models are looked for and put",
        default_text="that of Hugging Face's or Ollama's own programs",
    )  # fmt: skip
    prompt: str | None = flag(
        None, "-p --prompt", TEXT, INPUT,
        "generate from this text, print, and stop; - reads standard input",
    )  # fmt: skip
    prompt_file: Path | None = flag(None, "-f --file", PATH, INPUT, "the same, text from a file")
    prompt_tokens: tuple[int, ...] | None = flag(
        None, "--tokens", TOKEN_IDS, INPUT, "the same, from token ids: no tokenizer is involved"
    )
    session: Path | None = flag(
        None, "--session", PATH, INPUT,
        "start from the texts whose KV cache is in this file, and save it there at the end",
    )  # fmt: skip
    max_tokens: int = flag(
        128, "-n --max-tokens", integer(1, 2**31 - 1), INPUT, "stop after this many new tokens"
    )
    stop: tuple[str, ...] = flag(
        (), "--stop", STOP, INPUT, "stop before this text; may be repeated",
        default_text="none", many=True,
    )  # fmt: skip
    ignore_eos: bool = flag(
        False, "--ignore-eos", None, INPUT, "go on when the model says that it is done"
    )

    temperature: float = flag(
        0.0, "--temperature", real(0, 100), SAMPLING, "0 takes the likeliest token (greedy)"
    )
    top_k: int = flag(
        0, "--top-k", integer(0, 2**31 - 1, "K"), SAMPLING, "draw from the K likeliest; 0 is all"
    )
    top_p: float = flag(
        1.0, "--top-p", real(0, 1, above_low=True), SAMPLING,
        "draw from the likeliest tokens that together reach this probability",
    )  # fmt: skip
    min_p: float = flag(
        0.0, "--min-p", real(0, 1), SAMPLING,
        "leave out tokens below this share of the likeliest one's probability",
    )  # fmt: skip
    repeat_penalty: float = flag(
        1.0, "--repeat-penalty", real(0, 100, above_low=True), SAMPLING,
        "divide the score of tokens seen before by this; 1 is off",
    )  # fmt: skip
    seed: int | None = flag(
        None, "--seed", SEED, SAMPLING, "the same seed gives the same text",
        default_text="drawn and printed",
    )  # fmt: skip

    io_workers: int = flag(
        1, "--io-workers", integer(0, 64), PROCESSES,
        "processes that read experts; 0: the compute process reads for itself",
    )  # fmt: skip
    queue_depth: int = flag(
        4, "--queue-depth", integer(1, 64), PROCESSES, "reads in flight per I/O worker"
    )
    io_threads: int = flag(
        0, "--io-threads", integer(0, 64), PROCESSES,
        "reading threads inside the compute process (then --io-workers is 0); 0: inline",
    )  # fmt: skip
    single_process: bool = flag(
        False, "--single-process", None, PROCESSES,
        "no other process at all: the baseline without coordination",
    )  # fmt: skip
    compute_threads: int | None = flag(
        None, "--compute-threads", integer(1, 256), PROCESSES, "threads of the kernels",
        default_text="the cores of the plan",
    )  # fmt: skip
    pin_cores: bool = flag(
        False, "--pin-cores", None, PROCESSES, "give every process its cores, and print the plan"
    )
    core_plan: str | None = flag(
        None, "--core-plan", Kind("PLAN", PLAN_EXAMPLES, str, choices=PLAN_NAMES), PROCESSES,
        "shared, split, last, or such as compute=0,io=1; means --pin-cores",
        default_text="shared on 2 cores, last on more",
    )  # fmt: skip
    poll: str = flag(
        "auto", "--poll", choice("auto", "on", "off"), PROCESSES,
        "compute keeps its first core awake for up to 4 ms when it waits; auto: where no other "
        "process has that core and no thread of its own reads",
    )  # fmt: skip

    reader: str = flag(
        "auto", "--reader", choice(*READER_NAMES), READING,
        "how experts come from the disk: into the pool past the page cache (direct) or through it "
        "(buffered), or left in it and only brought there (mmap, willneed, populate)",
    )  # fmt: skip
    drop_cache: str = flag(
        "auto", "--drop-cache", choice("auto", "yes", "no"), READING,
        "whether buffered reads leave nothing in the page cache; auto: unless all experts fit into "
        "memory that nobody uses",
    )  # fmt: skip
    read_unit: str = flag(
        "expert", "--read-unit", choice("expert", "layer"), READING,
        "what one miss reads: the expert, or all experts of its layer",
    )  # fmt: skip
    policy: str = flag(
        "auto", "--policy", choice("auto", *POLICIES), READING,
        "which experts stay when the pool is full",
    )  # fmt: skip
    prefetch: str = flag(
        "auto", "--prefetch", choice("auto", "off", "prompt", "previous-token", "router"), READING,
        "read the next layer's experts while the disk idles: what a long prompt needs (prompt), or "
        "also what an answer probably will, where it pays; auto: router, where readers run aside",
    )  # fmt: skip
    usage: Path | None = flag(
        None, "--usage", PATH, READING, "start from the use counts in this file and save them there"
    )
    hot_set: Path | None = flag(
        None, "--hot-set", PATH, READING,
        "start from use counts as `moe-coord calibrate` or --usage saves them, and leave them so",
    )  # fmt: skip
    imatrix: Path | None = flag(
        None, "--imatrix", PATH, READING,
        "start from the counts per expert in a GGUF importance matrix of the model",
    )  # fmt: skip

    memory_bytes: int | None = flag(
        None, "--memory", SIZE, MEMORY, "what all processes together may use",
        default_text="what is available less a reserve",
    )  # fmt: skip
    pool: PoolSize | None = flag(
        None, "--pool", POOL, MEMORY, "memory for experts: 800M, 40% of them, or all",
        default_text="all that the budget leaves; 40% for the shipped model",
    )  # fmt: skip
    context_tokens: int | None = flag(
        None, "--context", integer(16, 2**24), MEMORY, "tokens of the longest sequence",
        default_text="what a fifth of the budget holds",
    )  # fmt: skip
    chunk_tokens: int | None = flag(
        None, "--chunk", integer(64, 2048, step=64), MEMORY,
        "prompt tokens that are computed together",
        default_text="what a tenth of the budget holds",
    )  # fmt: skip
    kv_type: str = flag(
        "auto", "--kv-type", choice("auto", "f32", "f16", "q8_0"), MEMORY,
        "how keys and values are kept; auto: f32 with exact numerics, f16 with fast",
    )  # fmt: skip
    dense: str = flag(
        "auto", "--dense", choice("auto", "anonymous", "mapped"), MEMORY,
        "where the dense weights lie: in memory of their own, or in the page cache; auto: in their "
        "own where the budget holds them",
    )  # fmt: skip
    experts_in: str = flag(
        "auto", "--experts-in", choice("auto", "pool", "own"), MEMORY,
        "where experts lie once all fit: in the shared pool, or in compute's own memory with huge "
        "pages; auto: as a short trial at start says",
    )  # fmt: skip
    mlock: str = flag(
        "auto", "--mlock", choice("auto", "require", "off"), MEMORY,
        "keep the weights out of swap: where the limit allows, or else fail, or not",
    )  # fmt: skip

    numerics: str = flag(
        "fast", "--numerics", choice("exact", "fast"), COMPUTE,
        "exact: float32 activations; fast: 8-bit activations with quantised weights",
    )  # fmt: skip
    kernels: str = flag(
        "auto", "--kernels", choice("auto", "native", "numpy"), COMPUTE,
        "compiled kernels where the install could build them, or the numpy references",
    )  # fmt: skip

    json: bool = flag(False, "--json", None, OUTPUT, "print one JSON object instead of text")
    csv: Path | None = flag(
        None, "--csv", PATH, OUTPUT,
        "write a row per generated token here: where its time went, faults, bytes read",
    )  # fmt: skip
    trace: Path | None = flag(
        None, "--trace", PATH, OUTPUT,
        "write the routing of every step here, for `moe-coord trace` and `replay`",
    )  # fmt: skip

    host: str = flag("127.0.0.1", "--host", TEXT, SERVICE, "address to serve on")
    port: int = flag(8080, "--port", PORT, SERVICE, "port of the API and the status page")
    api_key: str | None = flag(
        None, "--api-key", TEXT, SERVICE,
        "what clients must send as bearer token: a file with one key a line, or the key itself",
        default_text="none is asked for",
    )  # fmt: skip
    without_key: bool = flag(
        False, "--without-key", None, SERVICE,
        "serve without --api-key on an address that others can reach",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = flag(
        (), "--allow-host", TEXT, SERVICE,
        "name by which clients may call the service (a proxy's); may be repeated",
        default_text="localhost and addresses", many=True,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = flag(
        (), "--allow-origin", TEXT, SERVICE,
        "web page, such as http://localhost:3000, whose scripts may use the API; may be repeated",
        default_text="its own page", many=True,
    )  # fmt: skip
    aliases: tuple[str, ...] = flag(
        (), "--alias", TEXT, SERVICE,
        "name of the model in the API; may be repeated, the first one is shown",
        default_text="the file's name", many=True,
    )  # fmt: skip
    parallel: int = flag(
        4, "--parallel", integer(1, 64), SERVICE, "answers that are computed at the same time"
    )
    queue: int = flag(
        16, "--queue", integer(0, 1024), SERVICE,
        "requests that may wait for that; more are sent away (429)",
    )  # fmt: skip
    drain_seconds: int = flag(
        30, "--drain", integer(0, 3600, "SECONDS"), SERVICE,
        "how long running answers may take to end after SIGTERM",
    )  # fmt: skip
    metrics_port: int | None = flag(
        None, "--metrics-port", integer(0, 65535, "PORT"), SERVICE,
        "serve Prometheus metrics of every process on this port; 0 is off",
        default_text="9400 for the service, else off",
    )  # fmt: skip
    metrics_host: str = flag(
        "127.0.0.1", "--metrics-host", TEXT, SERVICE,
        "address of the metrics; who reaches another one can read them without a key",
    )  # fmt: skip
    notify_socket: str | None = flag(
        None, "--notify-socket", TEXT, SERVICE,
        "tell a service manager there that it is ready and alive (systemd's ${NOTIFY_SOCKET})",
        default_text="off",
    )  # fmt: skip

    @property
    def is_service(self) -> bool:
        """Whether there is no prompt: requests come over HTTP."""
        return self.prompt is None and self.prompt_file is None and self.prompt_tokens is None

    @property
    def has_pool(self) -> bool:
        """Whether experts lie in a pool; else the page cache is their only cache."""
        return self.reader not in WARMERS

    @property
    def only_faults(self) -> bool:
        """Whether nobody brings experts into the page cache: compute takes the page faults."""
        return self.reader == "mmap" and self.io_workers == self.io_threads == 0
