"""What a distillation says while it works: lines on stdout, and the same in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from mpissd.common.flags import said
from mpissd.learn.config import DistillConfig

NAME = "log.txt"


class Log:
    """Shows lines with the seconds since `started` (of time.monotonic()); keeps them in `folder`.

    Of several processes the first one (rank 0) says everything, the others what they sampled. A
    file that can no longer be written (a full disk) is said once; the work goes on.
    """

    def __init__(
        self, folder: Path, rank: int, started: float, show: Callable[[str], None]
    ) -> None:
        self._path, self._rank, self._started = folder / NAME, rank, started
        self._show = show
        self._keeps = True

    def begin(self, config: DistillConfig) -> None:
        """Adds a line with the date and the command; what an earlier command left stays."""
        if not self._rank:
            flags = [f"--{name}={value}" for name, value in said(config).items()]
            now = datetime.now(timezone.utc).isoformat(" ", "seconds")
            self._keep(" ".join([now, "mpissd distill", *flags]))

    def __call__(self, text: str) -> None:
        """Says a line."""
        if not self._rank or "batch" in text:
            line = self._dated(text)
            self._show(line)
            self._keep(line)

    def end(self, error: BaseException) -> None:
        """Keeps what ended the work early, which another place tells the user."""
        self._keep(self._dated(f"ended: {type(error).__name__}: {error}"))

    def _dated(self, text: str) -> str:
        return f"{time.monotonic() - self._started:7.1f} s  {text}"

    def _keep(self, line: str) -> None:
        """Adds a line in one write, so that lines of several processes stay whole."""
        if not self._keeps:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            self._keeps = False
            self._show(self._dated(f"{self._path}: {error.strerror}: no further lines"))
