"""A Ray Serve application: replicas of the service on the nodes of a cluster, behind one address.

    pip install 'moe-coord[ray]'
    serve run --app-dir deploy/ray application:build model=/models/model.gguf memory=4G replicas=2
    serve deploy deploy/ray/serve.yaml         # the same on a running cluster, from a file

Each replica starts ``moe-coord`` on a loopback port of its machine and hands requests through as
they come, streams too; a client that leaves frees its replica. The model's file must be at the same
path on every machine. A replica is told its memory: Ray plans with it, but bounds nothing.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence

import aiohttp
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.command.sizes import parse_size
from coordinator.serving.service_process import service_process

DRAIN_SECONDS = 30
# of one connection or for one message, so not to be handed on
OWN_HEADERS = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}


def build(args: dict[str, str]) -> Application:
    """The application. `args`: model, memory (both needed), replicas, cpus, parallel, queue, and
    flags (more flags of ``moe-coord``, separated by spaces)."""
    known = {"model", "memory", "replicas", "cpus", "parallel", "queue", "flags"}
    if not {"model", "memory"} <= args.keys() or not args.keys() <= known:
        raise ValueError(f"expected model=FILE memory=SIZE and of {sorted(known)}, found {args}")
    parallel, queue = int(args.get("parallel", 4)), int(args.get("queue", 16))
    flags = [
        f"--model={args['model']}",
        f"--memory={args['memory']}",
        f"--parallel={parallel}",
        f"--queue={queue}",
        f"--drain={DRAIN_SECONDS}",
        *args.get("flags", "").split(),
    ]
    replica = Replica.options(
        num_replicas=int(args.get("replicas", 1)),
        # what one replica runs or lets wait: more wait in Serve, for whichever is free first
        max_ongoing_requests=parallel + queue,
        ray_actor_options={
            "num_cpus": float(args.get("cpus", 2)),
            "memory": parse_size(str(args["memory"])),
        },
    )
    return replica.bind(flags)


@serve.deployment(
    health_check_period_s=5,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=DRAIN_SECONDS + 15,
)
class Replica:
    """One service, started with these flags, and the way to it."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._stack = contextlib.ExitStack()
        own = service_process(flags, _say, DRAIN_SECONDS + 5)
        self._url, self._is_alive = self._stack.enter_context(own)
        self._session: aiohttp.ClientSession | None = None

    def check_health(self) -> None:
        """Ray replaces a replica whose service has ended; workers are replaced inside it."""
        if not self._is_alive():
            raise RuntimeError("moe-coord has ended; its last lines are in the log of the replica")

    def __del__(self) -> None:
        """Ray's way to tell that the replica ends: the running answers end first."""
        self._stack.close()

    async def __call__(self, request: Request) -> Response:
        """Hand a request to the service, and its answer back as it comes."""
        if self._session is None:  # needs the loop in which requests are answered
            self._session = aiohttp.ClientSession(
                auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
            )
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in OWN_HEADERS
        }
        answer = await self._session.request(
            request.method, f"{self._url}{path}{query}", data=await request.body(), headers=headers
        )
        kept = {
            name: value for name, value in answer.headers.items() if name.lower() not in OWN_HEADERS
        }
        return StreamingResponse(_pieces(answer), status_code=answer.status, headers=kept)


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes; a client that leaves closes the connection, which cancels."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


def _say(line: str, _: bool) -> None:
    print(line, file=sys.stderr, flush=True)  # Ray keeps it in the replica's log
