"""The flags of `replicas`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, flag, number, switch, words
from mpissd.serve.replicas.living import EXPIRE_S

_BIND = re.compile(r"\S{0,253}:\d{1,5}")


@dataclass(frozen=True)
class ReplicasConfig(Checked):
    """Flags of `replicas`: the folder, and what is made of it."""

    folder: str = flag("out/replicas", words, "folder in which servers say their addresses")
    haproxy: str | None = flag(None, words, "HAProxy's configuration file to write")
    bind: str = flag("127.0.0.1:8000", words, "where HAProxy listens: HOST:PORT, *:PORT")
    watch: bool = flag(False, switch, "stay, and keep the file true until SIGTERM or Ctrl-C")
    pid_file: str | None = flag(
        None, words, "of HAProxy (haproxy -W -p FILE), which is told of a new file"
    )
    expire_s: float = flag(
        EXPIRE_S, number(1), "with watch: seconds behind which a replica without a beat is dead"
    )

    def check_bind(self) -> None:
        """Refuses an address that HAProxy would not take for one."""
        if not _BIND.fullmatch(self.bind):
            raise ConfigError(f"bind={self.bind}: allowed: HOST:PORT, *:PORT")

    def check_watch(self) -> None:
        """Refuses to watch for nothing, and to tell HAProxy of no file."""
        if self.haproxy is None and (self.watch or self.pid_file):
            name = "watch" if self.watch else "pid_file"
            raise ConfigError(f"{name} without haproxy: allowed: with haproxy=FILE")
