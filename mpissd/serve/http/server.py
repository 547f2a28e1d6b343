"""uvicorn with the server's limits, which ends without a word on stderr."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from mpissd.engine.job import Job
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.serve.config import AUTO, ServeConfig
from mpissd.serve.http.app import Defaults, Endpoints
from mpissd.serve.http.drain import Drain
from mpissd.serve.http.lead import Lead
from mpissd.serve.http.limits import HEAD_S, BoundedProtocol

_GRACE_S = 2
NOTICE_S = 5.0  # in which balancers turn away; HAProxy's checks take 1.5 s (replicas/haproxy.py)


class Server(uvicorn.Server):
    """A server whose requests end with it, each with an answer; SIGTERM drains it before."""

    def __init__(self, config: uvicorn.Config, lead: Lead, drain: Drain | None = None) -> None:
        super().__init__(config)
        self._lead, self.drain = lead, drain or Drain(lead)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain at the first SIGTERM; any other signal ends the server at once."""
        if sig != signal.SIGTERM or not self.drain.begin():
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Looks at the drain ten times a second; returns whether the server shall end."""
        is_over = self.drain.is_over(len(self.server_state.tasks))
        return await super().on_tick(counter) or is_over

    def end(self) -> None:
        """Ends the server as a signal does."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fails what still runs, and closes all connections."""
        self._lead.lose("the server ends")
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await asyncio.sleep(0)  # the answers leave first
        await super().shutdown(sockets)


def make_server(config: ServeConfig, job: Job, lead: Lead, replica: str | None = None) -> Server:
    """Returns the server of a configuration; it serves the sockets that it is given.

    replica: its id, where it is one of several.
    """
    run = config.run
    defaults = Defaults(
        names=tuple(dict.fromkeys(name for name in (job.target.name, run.pair) if name)),
        num_tokens=run.num_tokens or 512,
        temperature=run.temperature,
        max_wait_s=config.max_wait_s,
        key=config.key,
        about=about(config, job),
        replica=replica,
    )
    app = Endpoints(lead, load_tokenizer(job.target_where), defaults).app()
    drain = Drain(lead, config.drain_s, NOTICE_S if replica else 0.0)
    return Server(settings(app), lead, drain)


def about(config: ServeConfig, job: Job) -> dict[str, Any]:
    """Returns what a load's row tells of the server."""
    return {
        "mode": AUTO if config.auto else config.run.mode,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "replicas": 1,
        "num_drafts": config.drafts,
        "world_size": config.num_ranks,
        "lookahead": 0 if config.run.mode == "ar" else config.run.lookahead,
    }


def settings(app: object) -> uvicorn.Config:
    """Returns uvicorn's settings."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=BoundedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(HEAD_S),  # longer than clients keep an idle connection
        timeout_graceful_shutdown=_GRACE_S,
    )
