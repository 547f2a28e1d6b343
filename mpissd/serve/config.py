"""The flags of the commands `serve`, `chat` (a client of `serve`) and `replicas`."""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import (
    MODES,
    Checked,
    choice,
    contained,
    flag,
    integer,
    number,
    said,
    switch,
    words,
)
from mpissd.common.ranks import ANSWERING, RanksFlags

KEY_VARIABLE = "MPISSD_API_KEY"
# Flags that ranks do not get. The ranks' temperature is 0, as each request has its own.
FRONT_FLAGS = ("host", "port", "api_key", "register", "drain_s", "temperature")
DRAIN_S = 100.0  # default s to finish requests at the end; Slurm kills later (launch/replica.sh)
AUTO = "auto"
# Flags of `chat` that each request carries, or that only change how answers are shown.
_OF_REQUESTS = ("mode", "num_tokens", "temperature", "top_p", "stop", "show", "workload")
_BIND = re.compile(r"\S{0,253}:\d{1,5}")


@dataclass(frozen=True)
class ServeConfig(RanksFlags):
    """Flags of `serve`: flags of `run` for models and methods, and flags of the server."""

    run: RunConfig = contained(
        RunConfig,
        only=ANSWERING.difference(("stop", "show", "top_p", "saguaro_c"))
        | {"workload", "num_tokens", "on_draft_loss"},
        mode=flag("ssd", choice(AUTO, "ar", "sd", "ssd"), "decoding mode; auto: by the round"),
        workload=flag("text", choice("text"), "what serve decodes"),
        num_tokens=flag(512, integer(1), "tokens of an answer whose request says no max_tokens"),
        temperature=flag(0.0, number(0, 2), "temperature of a request that says none"),
    )
    auto: bool = flag(False, switch, "as mode=auto: choose the mode and K round by round")
    host: str = flag("127.0.0.1", words, "address to listen on; others than this need an API key")
    port: int = flag(8000, integer(0, 65535), "port to listen on; 0: a free one")
    api_key: str | None = flag(None, words, f"key that clients send (or {KEY_VARIABLE}, unseen)")
    max_running: int = flag(16, integer(1, 4096), "most sequences that decode together")
    kv_tokens: int = flag(
        0, integer(0), "tokens of KV cache; 0: each sequence may fill the context"
    )
    prefix_cache: bool = flag(True, switch, "let requests share the KV cache of a common beginning")
    sampling: bool = flag(True, switch, "let requests ask for a temperature above 0")
    max_queue: int = flag(64, integer(0, 65536), "most requests that wait; further ones get 429")
    max_wait_s: float = flag(600.0, number(0.1), "longest time of a request, from its arrival")
    register: str | None = flag(None, words, "shared folder in which to write the server's address")
    drain_s: float = flag(
        0.0, number(0, 86400), f"seconds for requests after SIGTERM (with register: {DRAIN_S:g})"
    )

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags that others imply: with mode=auto, the largest mode that the controller
        may choose (sd or ssd); with mode=ar, num_drafts=0; with register, a value of drain_s."""
        given = super().completed(flags)
        if given.get("mode") == AUTO:
            given |= {"mode": "sd" if given.get("num_drafts") == "0" else "ssd", "auto": "true"}
        if given.get("mode") == "ar":
            given.setdefault("num_drafts", "0")
        if given.get("register"):
            given.setdefault("drain_s", str(DRAIN_S))
        return given

    def check(self) -> None:
        """Raises ConfigError for flags that contradict each other."""
        super().check()
        if self.auto and self.run.mode != ("ssd" if self.num_drafts else "sd"):
            raise ConfigError(f"auto with mode={self.run.mode}: allowed: mode=auto")
        if self.auto and self.run.tree:
            raise ConfigError(f"tree={self.run.tree} with auto: allowed: mode=sd")
        if self.run.temperature and not self.sampling:
            asked = f"temperature={self.run.temperature:g} with sampling=false"
            raise ConfigError(f"{asked}: allowed: temperature=0, or sampling=true")
        if not is_local(self.host) and self.key is None:
            allowed = f"allowed: 127.0.0.1, or an API key ({KEY_VARIABLE}, or api_key)"
            raise ConfigError(f"host={self.host} without api_key: {allowed}")

    @property
    def decoding(self) -> RunConfig:
        """The ranks' configuration. Its temperature is 0, since each request has its own."""
        run = self.of_mode(self.run.mode)
        return replace(run, batch_size=self.max_running, temperature=0.0)

    @property
    def modes(self) -> tuple[str, ...]:
        """The decoding modes that a request may ask for."""
        if not self.auto:
            return (self.run.mode,)
        return MODES if self.num_drafts else MODES[:2]

    @property
    def key(self) -> str | None:
        """The API key that clients have to send, or None if none is needed."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None


@dataclass(frozen=True)
class ChatConfig(RanksFlags):
    """Flags of `chat`: flags of `run` for models, methods and sampling, and numbers of ranks."""

    run: RunConfig = contained(
        RunConfig,
        only=ANSWERING | {"workload", "num_tokens", "show"},
        workload=flag("text", choice("text"), "what chat decodes"),
        num_tokens=flag(512, integer(1), "most tokens of an answer"),
        show=flag(True, switch, "colour each token by what drafted it"),
    )
    url: str | None = flag(None, words, "a running `mpissd serve`: http://HOST:PORT/v1")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds num_drafts=0 if mode=ar and no draft model is given."""
        given = super().completed(flags)
        if given.get("mode") == "ar" and not given.keys() & {"pair", "draft"}:
            given.setdefault("num_drafts", "0")
        return given

    def server_arguments(self) -> list[str]:
        """Returns the command line of the `serve` that `chat` starts and sends its requests to."""
        flags = {name: text for name, text in said(self.run).items() if name not in _OF_REQUESTS}
        flags |= {"tp": f"{self.tp}", "num_drafts": f"{self.num_drafts}", "port": "0"}
        has_draft = self.run.mode != "ar" or self.run.pair or self.run.draft
        mode = "ssd" if self.num_drafts else "sd" if has_draft else "ar"
        flags |= {"mode": mode, "max_running": "1"}
        flags["lookahead"] = f"{self.run.lookahead}"
        if self.num_drafts:
            flags["fan_out"] = self.run.fan_out
        auto = [] if self.run.tree or mode == "ar" else ["--auto"]
        return ["serve", *auto, *(f"--{name}={value}" for name, value in flags.items())]


def is_local(host: str) -> bool:
    """Returns whether a host name or address is this machine's own (loopback)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ReplicasConfig(Checked):
    """Flags of `replicas`, which lists the servers of a folder and configures HAProxy."""

    folder: str = flag("out/replicas", words, "folder in which servers write their addresses")
    haproxy: str | None = flag(None, words, "HAProxy's configuration file to write")
    bind: str = flag("127.0.0.1:8000", words, "where HAProxy listens: HOST:PORT, *:PORT")
    watch: bool = flag(False, switch, "stay, and keep the file true until SIGTERM or Ctrl-C")
    pid_file: str | None = flag(
        None, words, "HAProxy's (haproxy -W -p FILE): to make it read a new configuration"
    )

    def check(self) -> None:
        """Raises ConfigError for flags that contradict each other."""
        super().check()
        if not _BIND.fullmatch(self.bind):
            raise ConfigError(f"bind={self.bind}: allowed: HOST:PORT, *:PORT")
        if self.haproxy is None and (self.watch or self.pid_file):
            name = "watch" if self.watch else "pid_file"
            raise ConfigError(f"{name} without haproxy: allowed: with haproxy=FILE")
