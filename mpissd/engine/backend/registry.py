"""Backends by name, imported only when needed: a CPU machine never imports GPU code."""

import importlib.util

from mpissd.common.errors import ConfigError, unknown
from mpissd.engine.backend.base import Backend, Binding

NAMES = ("auto", "numpy", "cupy", "emulated")
_NO_CUPY = (
    "backend 'cupy': CuPy is not installed; pip install '.[cuda12]' or make venv where there is a "
    "GPU; allowed elsewhere: numpy, emulated"
)


def itemsize_of(name: str) -> int:
    """Returns the bytes of an element of a weight or an activation on the backend `name`."""
    return 4 if name == "numpy" else 2


def _has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def choose(name: str) -> str:
    """Resolves "auto" to "cupy" if CuPy finds a GPU, else to "numpy"; returns other names as they
    are. Raises ConfigError for an unknown name."""
    if name not in NAMES:
        raise unknown("backend", name, NAMES)
    if name != "auto" or not _has_cupy():
        return "numpy" if name == "auto" else name
    import cupy

    try:
        return "cupy" if cupy.is_available() else "numpy"
    except cupy.cuda.runtime.CUDARuntimeError:  # CuPy 13 raises this error if there is no driver.
        return "numpy"


def check_here(name: str) -> None:
    """Raises ConfigError if `name` is cupy and this machine has no CuPy, or CuPy finds no GPU."""
    if name == "cupy" and not _has_cupy():
        raise ConfigError(_NO_CUPY)
    if name == "cupy" and choose("auto") != name:
        raise ConfigError("backend 'cupy': no usable GPU; allowed: numpy, emulated")


def binding_of(name: str, local_rank: int) -> Binding | None:
    """Returns the GPU that this rank takes with the backend `name`, and opens nothing; None without
    a GPU. Raises ConfigError for cupy if there is no CuPy, or no visible GPU."""
    if name != "cupy":
        return None
    if not _has_cupy():
        raise ConfigError(_NO_CUPY)
    from mpissd.engine.backend.cupy_device import bind

    return bind(local_rank)


def unopened(name: str) -> str:
    """Resolves a backend's name as far as is possible without looking for a GPU: "auto" becomes
    "numpy" if CuPy is not installed; any other name, and "auto" with CuPy, stays as it is."""
    return "numpy" if name == "auto" and not _has_cupy() else name


def open_backend(name: str, *, device: str, local_rank: int, graph: bool = True) -> Backend:
    """Opens the backend `name` (not "auto") on this rank's device. device: the profile of an
    emulated device. local_rank: this rank's number on its host, which selects the GPU. graph:
    whether CUDA graphs are captured. Raises ConfigError for an unknown name or profile, without
    CuPy, or without a visible GPU."""
    if name == "numpy":
        from mpissd.engine.backend.numpy_backend import NumpyBackend

        return NumpyBackend()
    if name == "emulated":
        from mpissd.engine.backend.profile import EmulatedBackend, load_profile

        return EmulatedBackend(load_profile(device))
    if name == "cupy":
        if not _has_cupy():
            raise ConfigError(_NO_CUPY)
        from mpissd.engine.backend.cupy_backend import CupyBackend

        return CupyBackend(local_rank, graph=graph)
    raise unknown("backend", name, NAMES)
