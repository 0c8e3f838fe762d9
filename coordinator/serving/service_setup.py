"""The process settings of the service's HTTP process."""

import socket

from coordinator.api.settings import HttpSettings, encode_settings
from coordinator.command.line import version
from coordinator.plan.setup import Setup
from coordinator.processes.launch import HTTP, ChildSpec
from coordinator.serving.service_socket import api_keys
from shm.pool import PoolLayout
from shm.service_messages import decode


def http_spec(setup: Setup, listener: socket.socket) -> ChildSpec:
    """What is started. Raises `ConfigError` (the keys)."""
    config = setup.config
    settings = HttpSettings(
        listener_fd=listener.fileno(),
        model_path=str(config.model),
        fingerprint=setup.model.fingerprint,
        names=model_names(setup),
        version=version(),
        n_context=setup.plan.context_tokens,
        vocabulary_size=setup.spec.vocabulary_size,
        parallel=config.parallel,
        queue=config.queue,
        api_keys=api_keys(config),
        allowed_hosts=(*config.allowed_hosts, config.host),
        allowed_origins=config.allowed_origins,
    )
    return ChildSpec(
        name=HTTP,
        module="coordinator.api",
        cores=setup.cores.http if setup.cores else (),
        pool_fd=None,
        layout=PoolLayout(()),
        file_fds=(),
        other_fds=(listener.fileno(),),
        settings=encode_settings(settings),
        decode=decode,
    )


def model_names(setup: Setup) -> tuple[str, ...]:
    """Names by which clients may call the model; the first is shown."""
    path = setup.config.model
    return tuple(dict.fromkeys((*setup.config.aliases, path.stem, path.name)))
