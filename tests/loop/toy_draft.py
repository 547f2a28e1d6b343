"""Drafts of random tokens that fail again and again, one for each client: toy_draft.py ADDRESS"""

import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from itertools import count

import numpy as np

from mpissd.common.errors import MpissdError
from mpissd.common.rounds import Event, Speculation
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.comm.peer import Address, Connection
from mpissd.engine.comm.wire import LinkShape

V, K, LONGEST = 61, 3, 96
SHAPE = LinkShape(0, 4, K, prompt_tokens=LONGEST)
FAULTS = "kill", "hang", "slow", "nothing", "noise", "part", "stall", "round", "token", "count"


def draft(peer: socket.socket) -> None:
    """Answers questions; after up to seven good answers comes a fault of a random kind."""
    rng = random.Random()
    fault, after = rng.choice(FAULTS), rng.randrange(8)
    own = Connection(peer)
    link = DraftEnd(SHAPE, own, own.outbox, own.inbox)
    list(own.greet(None, SHAPE, V))
    for round_ in count():
        outcome, _ = link.outcome(round_ - 1)
        size = int((outcome.events != Event.RELEASE).sum())
        rows = [[0, 1, K, *rng.choices(range(V), k=K)] for _ in range(size)]
        if round_ == after:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stall":
                peer.send(bytes(9))
            if fault in ("hang", "stall"):  # until the client has left
                held = select.poll()
                held.register(peer, select.POLLRDHUP)
                held.poll()
            if fault in ("hang", "stall", "nothing"):
                return
            if fault == "slow":
                time.sleep(0.2)
            if fault in ("noise", "part"):
                peer.send(os.urandom(4 * rng.randrange(2, 99)) if fault == "noise" else b"\x01")
            rows[-1][2] += 9 * (fault == "count")
            rows[-1][-1] += V * (fault == "token")
        named = round_ + (round_ == after and fault == "round")
        link.send_speculation(Speculation(named, np.array(rows, np.int32)))
        if round_ == after:
            fault, after = rng.choice(FAULTS), round_ + rng.randrange(1, 8)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    address = Address.of(sys.argv[1])
    with address.socket() as listener:
        listener.bind(address.name)
        listener.listen()
        while True:
            client, _ = listener.accept()
            if not os.fork():
                with suppress(OSError, MpissdError):  # the client has left
                    draft(client)
                os._exit(0)
            client.close()
