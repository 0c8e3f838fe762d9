"""The compute worker's side of the link: how it waits."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from compute_worker.__main__ import SocketLink
from compute_worker.waiting import POLL_SECONDS
from shm.birth import ChildArguments
from shm.link import endpoint_in, make_socket_directory, pair_socket, remove_socket_directory
from shm.messages import Abort, Heartbeat, ReadSpan, SlabNotice, SlotLease, decode, encode
from shm.notices import give_notice, notice_pipe
from shm.pool import PoolLayout

QUIET_SECONDS = 0.7  # longer than it may poll, and than a heartbeat takes


class Ends:
    """A link, and the coordinator's end of it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.parent = pair_socket(context, endpoint, bind=True)
        self.child = pair_socket(context, endpoint, bind=False)
        layout = PoolLayout(())
        arguments = ChildArguments("compute", endpoint, "t", os.getppid(), (), None, layout, ())
        self.link = SocketLink(self.child, arguments)
        self.notice_read, self.notice_write = notice_pipe()
        self.link.hear_readers(self.notice_read)

    def close(self) -> None:
        for socket in (self.parent, self.child):
            socket.close(linger=0)
        for fd in (self.notice_read, self.notice_write):
            os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    directory = make_socket_directory()
    with zmq.Context() as context:
        made = Ends(context, endpoint_in(directory))
        yield made
        made.close()
    remove_socket_directory(directory)


@pytest.mark.parametrize("polls", [False, True])
def test_messages_and_notices_come_while_it_waits(ends: Ends, polls: bool) -> None:
    if polls:
        ends.link.keep_awake()
    notice = SlabNotice(SlotLease(3, 7), ReadSpan(5, 9))
    for delay_seconds in (0.0, POLL_SECONDS / 2, POLL_SECONDS * 5):
        told = threading.Timer(delay_seconds, give_notice, (ends.notice_write, *notice))
        told.start()
        assert ends.link.receive() == notice
        told.join()
        said = threading.Timer(delay_seconds, ends.parent.send, (encode(Abort(4)),))
        said.start()
        assert ends.link.receive() == Abort(4)
        said.join()
    assert ends.link.poll() is None


@pytest.mark.parametrize("polls", [False, True])
def test_a_long_wait_takes_next_to_no_processor_time(ends: Ends, polls: bool) -> None:
    """It polls for a moment, and then sleeps but for its heartbeats."""
    if polls:
        ends.link.keep_awake()
    said = threading.Timer(QUIET_SECONDS, ends.parent.send, (encode(Abort(4)),))
    said.start()
    began = time.process_time()
    assert ends.link.receive() == Abort(4)
    assert time.process_time() - began < QUIET_SECONDS / 4
    said.join()
    assert isinstance(decode(ends.parent.recv()), Heartbeat)
