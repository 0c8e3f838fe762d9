"""A child process that misbehaves as its name says: ``python -P -m rogue_child ARGUMENTS``."""

import dataclasses
import os
import sys
import time

import zmq

from shm.birth import begin_life, decode_arguments
from shm.link import pair_socket
from shm.messages import (
    PROTOCOL_VERSION,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Progress,
    Ready,
    Stop,
    decode,
    encode,
)


def main() -> None:
    """Say hello, or not, and misbehave."""
    arguments = decode_arguments(sys.argv[1])
    begin_life(arguments)
    name = arguments.process
    hello = Hello(PROTOCOL_VERSION, name, os.getpid(), arguments.token)
    changes = {
        "other protocol": {"protocol": PROTOCOL_VERSION + 1},
        "other name": {"process": "io7"},
        "other pid": {"pid": 1},
        "other token": {"token": "x"},
    }
    if name == "dies without a word":
        sys.exit(7)
    with zmq.Context() as context:
        link = pair_socket(context, arguments.endpoint, bind=False)
        if name == "rubbish":
            link.send(b"\xc1" * 50)
        elif name == "ready before hello":
            link.send(encode(Ready(name, "{}")))
        else:
            link.send(encode(dataclasses.replace(hello, **changes.get(name, {}))))
        if name in ("rubbish", "ready before hello", *changes):
            time.sleep(60)
        decode(link.recv())  # Welcome
        if name == "last words":
            link.send(encode(Failed(name, 4, "no memory for that")))
            link.close()
            context.term()
            os._exit(4)
        if name == "ready with rubbish":
            link.send(encode(Ready(name, "{")))
            time.sleep(60)
        if name == "hello twice":
            link.send(encode(hello))
        if name == "finishes others":
            link.send(encode(Finished(1, "eos")))
        if name == "stuck":
            link.send(encode(Progress("dense", 1, 3)))
            time.sleep(60)
        link.send(encode(Ready(name, "{}")))
        if name == "floods":
            for number in range(5000):
                link.send(encode(Heartbeat(name, number)))
        while not isinstance(decode(link.recv()), Stop):
            pass
        link.close()


if __name__ == "__main__":
    main()
