"""The house: how much a folder holds, which room may import which, and no circles. Read from the sources alone."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from tests import ROOT

ROOMS = ("jobs", "metrics", "worker", "scheduler")
MOST_FILES = {"tests": 30} | dict.fromkeys(ROOMS, 16)  # in a folder, `__init__.py` and folders below it not counted
DRIVER = (
    *("jobs", "metrics", "worker"),
    *("scheduler.cluster", "scheduler.display", "scheduler.limits", "scheduler.process"),
)
MAY_IMPORT = {  # besides itself; a room's name holds for the rooms below that are not named here
    "jobs": (),
    "metrics": ("jobs",),
    "worker": ("jobs", "metrics"),
    "scheduler.process": ("jobs",),
    "scheduler.limits": ("jobs",),
    "scheduler.display": ("jobs", "scheduler.process"),
    "scheduler.webhooks": ("jobs", "scheduler.display"),
    "scheduler.cluster": ("jobs", "worker", "scheduler.process"),
    "scheduler.driver": DRIVER,
    "scheduler.runs": (*DRIVER, "scheduler.driver"),
    "scheduler.serve": (*DRIVER, "scheduler.driver", "scheduler.runs", "scheduler.webhooks"),
    "scheduler.commands": (
        *(*DRIVER, "scheduler.driver", "scheduler.runs", "scheduler.serve"),
        *("scheduler.chaos", "scheduler.webhooks"),
    ),
    "scheduler.demo": (*DRIVER, "scheduler.driver", "scheduler.runs"),
    "scheduler.chaos": (*DRIVER, "scheduler.driver", "scheduler.runs", "scheduler.demo"),
    "scheduler": (
        "jobs",
        "scheduler.chaos",
        "scheduler.commands",
        "scheduler.display",
        "scheduler.process",
    ),  # the command
}
NOT_AT_IMPORT = ("TYPE_CHECKING", "__name__ == '__main__'")  # what stands under these is for mypy, or for a program


class Imports(ast.NodeVisitor):
    """Collects the modules that a source imports, also within functions."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules
        self.found: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names} & self._modules

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in (f"{node.module}.{alias.name}" for alias in node.names):
            self.found |= {name if name in self._modules else str(node.module)} & self._modules

    def visit_If(self, node: ast.If) -> None:
        for child in node.orelse if ast.unparse(node.test) in NOT_AT_IMPORT else ast.iter_child_nodes(node):
            self.visit(child)


def imports_of(source: str, modules: set[str]) -> set[str]:
    visitor = Imports(modules)
    visitor.visit(ast.parse(source))
    return visitor.found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of the product imports of the product; the rooms themselves, which hold no code, left out."""
    paths = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    sources = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}
    modules = set(sources) - set(ROOMS)
    return {name: imports_of(path.read_text(encoding="utf-8"), modules) for name, path in sources.items()}


def room_of(module: str) -> str:
    """The nearest room that `MAY_IMPORT` names."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


def test_a_folder_holds_no_more_than_one_takes_in_at_a_glance() -> None:
    paths = [path.relative_to(ROOT) for top in MOST_FILES for path in (ROOT / top).rglob("*.py")]
    num_files = Counter(path.parent for path in paths if path.name != "__init__.py")
    assert {str(folder): num for folder, num in num_files.items() if num > MOST_FILES[folder.parts[0]]} == {}


def test_rooms_import_one_way(imports: dict[str, set[str]]) -> None:
    upwards = [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in sorted(others)
        if room_of(other) not in (room_of(name), *MAY_IMPORT[room_of(name)])
    ]
    assert upwards == []


def test_no_modules_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_an_import_counts_wherever_it_stands_but_for_mypy() -> None:
    source = """
import a.b
from a import c, of_a
if TYPE_CHECKING:
    import a.d
else:
    import a.e
def later():
    from a.f import something
if __name__ == "__main__":
    import a.g
"""
    modules = {"a", *(f"a.{name}" for name in "bcdefg")}
    assert imports_of(source, modules) == {"a", "a.b", "a.c", "a.e", "a.f"}
