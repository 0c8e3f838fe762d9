"""The address of the service: whether it may be served on, and the socket that listens there.

Bound by the coordinator before anything else starts, so that a port in use is an error of one line,
and kept by it, so that connections wait while the HTTP process is started again.
"""

import ipaddress
import socket
from pathlib import Path

from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError

BACKLOG = 256
MAX_KEY_FILE_BYTES = 64 * 1024
LOOKS_LIKE_A_PATH = ("/", "./", "../", "~/")
# what the kernel holds of an answer that nobody reads; a stream is a few hundred bytes a token
SEND_BUFFER_BYTES = 64 * 1024


def listen(config: Config) -> socket.socket:
    """The listening socket of `--host` and `--port`; raises `ConfigError`."""
    host, port = config.host, config.port
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host: expected an address of this machine, found {host!a:.60}: {error}"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port: expected a port of {host} that is free, found {port}: {error.strerror}; "
            "use another, or end what listens there"
        ) from error
    return listener


def check_reachable(config: Config) -> None:
    """Others may not use the service by accident; raises `ConfigError`."""
    if is_loopback(config.host) or config.api_key is not None or config.without_key:
        return
    raise ConfigError(
        f"--host: expected --api-key with an address that others can reach, found {config.host} "
        "without; give a key (a file with one a line), or say --without-key"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_keys(config: Config) -> tuple[str, ...]:
    """The keys of `--api-key`: those of the file of that name if there is one, else itself."""
    if config.api_key is None:
        return ()
    path = Path(config.api_key)
    try:
        is_file = path.is_file()
    except OSError:  # a key may be longer than a name of a file
        is_file = False
    if not is_file and config.api_key.startswith(LOOKS_LIKE_A_PATH):
        raise ConfigError(
            f"--api-key: expected a key or a file with keys, found no file {path}; a key that "
            "looks like a path must be given in a file"
        )
    if not is_file:
        return (config.api_key,)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key: expected a text file with keys, found {path}: {error}"
        ) from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"--api-key: expected a key a line in {path}, found none")
    return keys


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
