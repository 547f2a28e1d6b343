"""The socket on which the server listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from mpissd.common.errors import ConfigError

SEND_BYTES = 1 << 16


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Listens on an address; raises ConfigError if that cannot be."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: without it the kernel holds megabytes for one that is slow.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listener.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port}: {error.strerror}: allowed: a free one"
        ) from error
    with listener:
        yield listener
