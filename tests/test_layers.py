"""Imports only go downward, and importing few rooms starts MPI, CUDA or PyTorch.

A module that no layer lists fails here: add it to its layer.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.scripts import ROOT, python

# By the longest prefix that fits. A module imports from its own layer and from those below.
LAYERS = {
    "mpissd": 0,
    "mpissd.common": 0,
    "mpissd.engine": 5,
    "mpissd.engine.law": 1,
    "mpissd.engine.backend": 2,
    "mpissd.engine.comm": 2,
    "mpissd.engine.text": 3,
    "mpissd.engine.model": 3,
    "mpissd.engine.round": 4,
    "mpissd.engine.oracle": 5,
    "mpissd.engine.job": 5,
    "mpissd.engine.sizes": 5,
    "mpissd.engine.features": 5,
    "mpissd.engine.in_process": 5,
    "mpissd.engine.session": 6,
    "mpissd.lab": 7,
    "mpissd.lab.gates": 7,
    "mpissd.lab.tables": 7,
    "mpissd.lab.pair": 7,
    "mpissd.lab.predict": 8,
    "mpissd.lab.plan": 8,
    "mpissd.lab.show": 8,
    "mpissd.lab.measure": 9,
    "mpissd.lab.probe": 10,
    "mpissd.lab.chat": 10,
    "mpissd.lab.load": 10,
    "mpissd.lab.sweep": 10,
    "mpissd.vllm": 6,
    "mpissd.huggingface": 6,
    "mpissd.learn": 7,
    "mpissd.online": 8,
    "mpissd.ops": 7,
    "mpissd.ops.slurm": 7,
    "mpissd.ops.warden": 7,
    "mpissd.serve": 7,
    "mpissd.ops.doctor": 11,
    "mpissd.cli": 11,
    "mpissd.__main__": 12,
}
# These need only NumPy.
NUMPY_ALONE = (
    "mpissd.common",
    "mpissd.engine.law",
    "mpissd.lab.gates",
    "mpissd.lab.tables",
    "mpissd.lab.sweep.plan",
    "mpissd.ops.slurm",
    "mpissd.ops.warden",
)
# Importing these starts MPI; the others import it inside functions, if at all.
STARTS_MPI = (
    "mpissd.engine.comm.mpi_",
    "mpissd.engine.session",
    "mpissd.lab.measure",
    "mpissd.lab.probe",
    "mpissd.serve.ranks",
    "mpissd.lab.sweep.run",
)
STARTS_CUDA = ("mpissd.engine.backend.cupy_",)
STARTS_NUMBA = ("mpissd.engine.model.transformer.numba_ops",)
SLOW = ("cupy", "cupyx", "nvmath", "scipy", "numba", "httpx")  # imported only where they are used
STARTS_TORCH = (
    *(f"mpissd.learn.{name}" for name in ("draft evaluate job llama sample train").split()),
    "mpissd.online.trainer",
)
STARTS_HTTP = ("mpissd.serve.app", "mpissd.serve.front", "mpissd.lab.chat")
BELOW_ALL = {"fire", "numpy", *sys.stdlib_module_names}  # what they may import besides mpissd


@dataclass(frozen=True)
class Import:
    """One import statement's module, and whether it runs when the file is imported."""

    module: str
    line: int
    at_import: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(
        module.startswith(prefix) if prefix.endswith("_") else f"{module}.".startswith(f"{prefix}.")
        for prefix in prefixes
    )


def layer_of(module: str) -> int:
    """ValueError for a module in no layer."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in LAYERS and (prefix != "mpissd" or end == len(parts)):
            return LAYERS[prefix]
    raise ValueError(f"{module} is in no layer")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        runs = at_import and not inside and not is_type_checking(child)
        yield child, runs
        yield from walk(child, runs)


def imports_in(source: str, package: str, known: frozenset[str]) -> list[Import]:
    found = []
    for node, at_import in walk(ast.parse(source), True):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            below = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name if name in known else base for name in below]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules = [a.value for a in node.args if isinstance(a, ast.Constant)]  # type: ignore[misc]
        line = getattr(node, "lineno", 0)
        found += [Import(m, line, at_import) for m in dict.fromkeys(modules)]
    return found


@lru_cache(maxsize=1)
def all_imports() -> dict[str, list[Import]]:
    paths = {name_of(path): path for path in sorted((ROOT / "mpissd").rglob("*.py"))}
    known = frozenset(paths)
    return {
        name: imports_in(
            path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0], known
        )
        for name, path in paths.items()
    }


def ours(module: str) -> bool:
    return module.split(".")[0] == "mpissd"


@pytest.mark.parametrize("module", all_imports())
def test_imports_go_downward(module: str) -> None:
    here = layer_of(module)
    for found in all_imports()[module]:
        if ours(found.module):
            there = layer_of(found.module)
            assert there <= here, (
                f"{module}:{found.line} (layer {here}) imports {found.module} (layer {there})"
            )
        elif is_in(module, NUMPY_ALONE):
            top = found.module.split(".")[0]
            assert top in BELOW_ALL, f"{module}:{found.line} imports {found.module}"


def test_nothing_imports_itself_around_a_corner() -> None:
    graph = {
        name: {i.module for i in found if ours(i.module) and i.module != name}
        for name, found in all_imports().items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_no_two_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "mpissd").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} <= {"Part", "Request", "Room"}


def test_importing_the_rooms_starts_neither_mpi_nor_cuda() -> None:
    loud = (*STARTS_MPI, *STARTS_CUDA, *STARTS_NUMBA, *STARTS_TORCH, *STARTS_HTTP)
    quiet = [m for m in all_imports() if not is_in(m, loud)]
    assert {"mpissd", "mpissd.cli.arguments", "mpissd.engine.job", "mpissd.__main__"} <= set(quiet)
    program = (
        "import importlib, json, sys\n"
        f"for name in {quiet!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loud = [m for m in sys.modules if m.split('.')[0] in {SLOW!r}]\n"
        "    loud += [m for m in sys.modules if m == 'mpi4py.MPI']\n"
        "    if loud:\n"
        "        sys.exit(f'{name} starts {loud[0]}')\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'mpissd']))\n"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr[-500:]
    assert set(json.loads(done.stdout)) == set(quiet)  # only quiet modules were imported


def test_the_analysis_needs_numpy_alone_of_mpissd() -> None:
    for path in sorted((ROOT / "analysis").rglob("*.py")):
        for found in imports_in(path.read_text(), "analysis", frozenset(all_imports())):
            if ours(found.module):
                where = f"{path.relative_to(ROOT)}:{found.line}"
                assert is_in(found.module, NUMPY_ALONE), f"{where} imports {found.module}"
