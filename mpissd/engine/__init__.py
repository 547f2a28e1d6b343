"""The engine, which decodes: the algorithm, the devices, the models, the workloads and the two
loops.

The names below are the engine's public interface (docs/engine.md). Each is imported when it is
used, so that importing the package takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpissd.common.config import RunConfig
    from mpissd.common.workloads import register
    from mpissd.engine.decode.generate import generate
    from mpissd.engine.decode.in_process import Decoder
    from mpissd.engine.workload.base import Workload
    from mpissd.engine.workload.workers import DraftWorker, TargetWorker

__all__ = [
    "Decoder",
    "DraftWorker",
    "RunConfig",
    "TargetWorker",
    "Workload",
    "generate",
    "register",
]

_HOMES = {
    "Decoder": "mpissd.engine.decode.in_process",
    "DraftWorker": "mpissd.engine.workload.workers",
    "RunConfig": "mpissd.common.config",
    "TargetWorker": "mpissd.engine.workload.workers",
    "Workload": "mpissd.engine.workload.base",
    "generate": "mpissd.engine.decode.generate",
    "register": "mpissd.common.workloads",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the public face; raises AttributeError for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
