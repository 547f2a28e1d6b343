"""Plays the front: a socket, the ranks of a server, and the messages between them."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mpissd.serve.protocol import SOCKET_VARIABLE, End, Line, Message, Ready, Tokens
from tests.mpi.harness import DIRECT, Started
from tests.scripts import until

M = TypeVar("M")
_LONG_S = 90.0


class Server:
    """The ranks of a server, spoken to as the front does."""

    def __init__(self, job: Started, line: Line) -> None:
        self.job, self._line = job, line
        self.heard: list[Message] = []
        self.ready = self.wait_for(Ready)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._line.put(message)
        self._line.flush()

    def wait_for(self, kind: type[M], wait_s: float = _LONG_S) -> M:
        """The next message of a kind."""
        found: list[M] = []
        until(
            lambda: found.extend(m for m in self.take() if isinstance(m, kind)) or found,
            wait_s,
            kind.__name__,
        )
        return found[0]

    def take(self) -> Sequence[Message]:
        assert not self._line.is_closed, "the lead has left"
        new = self._line.take(0.2)
        self.heard += new
        return new

    def ends(self, ids: Sequence[int], wait_s: float = _LONG_S) -> dict[int, End]:
        """The ends of these requests."""
        found: dict[int, End] = {}

        def are_ended() -> bool:
            self.take()
            found.update({m.id: m for m in self.heard if isinstance(m, End) and m.id in ids})
            return len(found) == len(ids)

        until(are_ended, wait_s, f"the end of {ids}")
        return found

    def tokens(self, request_id: int) -> list[int]:
        return [
            t for m in self.heard if isinstance(m, Tokens) and m.id == request_id for t in m.tokens
        ]

    def leave(self) -> None:
        self._line.close()


@contextmanager
def serving(folder: Path, ranks: int, *flags: str, mpirun: str | None = None) -> Iterator[Server]:
    """Starts the ranks of a server, and expects them to end well."""
    path = folder / "front"
    env = {SOCKET_VARIABLE: str(path)} | ({} if mpirun is None else {"MPIRUN": mpirun})
    words = ["mpirun", str(ranks), "mpissd", "serve", *flags]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_LONG_S)
        with Started(["bash", "-c", DIRECT, *words], env) as job:
            server = Server(job, Line(listener.accept()[0]))
            yield server
            server.leave()
            code, _, error = job.finish()
            assert code == 0, error
