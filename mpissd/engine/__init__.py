"""The engine decodes: it holds the algorithm, devices, models, workloads and decoding loops.

The names below are the engine's public interface (docs/engine.md). Each is imported when it is
first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpissd.common.config import RunConfig as RunConfig
    from mpissd.common.workloads import register as register
    from mpissd.engine.in_process import Decoder as Decoder
    from mpissd.engine.in_process import generate as generate
    from mpissd.engine.oracle.workload import Workload as Workload
    from mpissd.engine.round.oracle import DraftOracle as DraftOracle
    from mpissd.engine.round.oracle import TargetOracle as TargetOracle

_HOMES = {
    "Decoder": "mpissd.engine.in_process",
    "DraftOracle": "mpissd.engine.round.oracle",
    "RunConfig": "mpissd.common.config",
    "TargetOracle": "mpissd.engine.round.oracle",
    "Workload": "mpissd.engine.oracle.workload",
    "generate": "mpissd.engine.in_process",
    "register": "mpissd.common.workloads",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Imports and returns the public object `name`; raises AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
