"""The text of `mpissd --version`."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from mpissd.common.origin import commit
from mpissd.ops.doctor import installed

_PACKAGES = "numpy numba cupy-cuda12x cupy-cuda13x nvmath-python tokenizers torch".split()


def lines() -> Iterator[str]:
    """Yields lines with the versions and places of mpissd, Python, MPI and libraries."""
    libraries, error = installed()
    version, place = libraries["mpissd"]
    python, interpreter = libraries["python"]
    yield f"mpissd {version} ({', '.join(filter(None, [commit(), place]))})"
    yield f"Python {python} ({interpreter})"
    yield f"MPI: {error or ' '.join(libraries['MPI library'])}"
    packages = []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages.append(f"{name} {metadata.version(name)}")
    yield f"Packages: {', '.join(packages)}"
