"""The port of a service of one's own."""

import socket

import pytest

from coordinator.serving.service_process import HOST, reserved_port


def test_a_port_is_kept_for_the_service() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        with (
            socket.create_server((HOST, port)) as service,
            socket.create_connection((HOST, port)),
        ):
            service.accept()[0].close()
    with socket.create_server((HOST, port)):
        pass  # nothing holds it now
