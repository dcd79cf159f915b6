"""Checks in the sources which room imports which."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests import ROOT

PACKAGE = "swiftbatch"
ROOMS = ("jobs", "metrics", "worker", "scheduler")
OUTSIDE = "bench"  # not installed; it may import all rooms, and no room imports it
# The packages of `worker`, each of which imports only those before it.
WORKER = {
    "worker.kernels": "arithmetic in C and in Triton, of rows and matrices alone",
    "worker.sampling": "tokens sampled from logits: sequences, trees, noise, filters, walks, in torch, C and Triton",
    "worker.constraints": "which tokens may come: grammars and budgets of thought, for a tree's rows",
    "worker.model": "a model on disk: its architecture, weights and their formats",
    "worker.text": "text to tokens and back: tokenizer, chat template, output text, stop strings",
    "worker.kv": "keys and values, full and sparse, and how memory is shared out for them",
    "worker.forward": "batch-invariant forwards of the target model",
    "worker.drafters": "engines, what they share, and the catalogue of them",
    "worker.inspection": "what a model is and how it would run, before its weights are read",
    "worker.quantizing": "a plain model made into a quantized one, and what that costs on a text",
    "worker.engine": "the decoding loop: prefill, proposing, verifying, stopping",
    "worker.config": "what decides a run's bytes",
    "worker.exactness": "whether a machine keeps the promise",
    "worker.training": "trainings of targets and of the engines' parts",
    "worker.replay": "tokens that exist, drawn again many positions at a time",
    "worker.session": "a worker's jobs: orders, checkpoints, resumes, reports",
    "worker.decode_bench": "how fast each engine decodes on this machine",
}
DRIVER = (
    *("jobs", "metrics", *WORKER),
    *("scheduler.cluster", "scheduler.display", "scheduler.process"),
)
# The packages of `scheduler.serve`, each of which imports only those before it, and then the server itself.
SERVE = (
    *("scheduler.serve.records", "scheduler.serve.batches", "scheduler.serve.routes", "scheduler.serve.pages"),
    "scheduler.serve",
)
MAY_IMPORT = {  # besides itself; an entry covers the rooms below it that are not listed
    "jobs": (),
    "metrics": ("jobs",),
    **{name: ("jobs", "metrics", *list(WORKER)[:number]) for number, name in enumerate(WORKER)},
    "scheduler.process": ("jobs",),
    "scheduler.display": ("jobs", "scheduler.process"),
    "scheduler.cluster": ("jobs", *WORKER, "scheduler.process"),
    "scheduler.driver": DRIVER,
    "scheduler.runs": (*DRIVER, "scheduler.driver"),
    **{name: (*DRIVER, "scheduler.driver", "scheduler.runs", *SERVE[:number]) for number, name in enumerate(SERVE)},
    "scheduler.api": (*DRIVER, "scheduler.driver", "scheduler.runs", "scheduler.commands"),
    "scheduler.commands": (*DRIVER, "scheduler.driver", "scheduler.runs", *SERVE, "scheduler.chaos"),
    "scheduler.demo": (*DRIVER, "scheduler.driver", "scheduler.runs"),
    "scheduler.chaos": (*DRIVER, "scheduler.driver", "scheduler.runs", "scheduler.demo"),
    "scheduler": (  # the command
        *("jobs", "scheduler.chaos", "scheduler.commands", "scheduler.display", "scheduler.process"),
    ),
}
MAY_IMPORT[OUTSIDE] = tuple(MAY_IMPORT)
MOST_LINES = 200  # of two modules merged
ALONE = {  # modules with one importer that stay separate
    "scheduler.__main__": "signals are taken before the command is imported",
}
FOR_MYPY, AS_A_PROGRAM = "TYPE_CHECKING", "__name__ == '__main__'"


class Imports(ast.NodeVisitor):
    """Collects imports inside functions too, and those for types alone."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules
        self.found: set[str] = set()
        self.for_types: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {name for alias in node.names if (name := _short(alias.name)) in self._modules}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = _short(str(node.module))
        for name in (f"{module}.{alias.name}" for alias in node.names):
            self.found |= {name if name in self._modules else module} & self._modules

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if test == FOR_MYPY:
            self.for_types |= imports_of(node.body, self._modules).found
        for child in node.orelse if test in (FOR_MYPY, AS_A_PROGRAM) else (*node.body, *node.orelse):
            self.visit(child)

    def generic_visit(self, node: ast.AST) -> None:
        """Skip expressions, which are most of a source."""
        for part in ("body", "handlers", "cases", "orelse", "finalbody"):
            for child in getattr(node, part, ()):
                self.visit(child)


def _short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


def imports_of(statements: list[ast.stmt], modules: set[str]) -> Imports:
    visitor = Imports(modules)
    for statement in statements:
        visitor.visit(statement)
    return visitor


Graph = dict[str, set[str]]


@pytest.fixture(scope="module")
def imports_of_all() -> dict[str, Imports]:
    """The imports of each product module, without packages.

    Parsed sources go, because the garbage collector would visit them again and again.
    """
    paths = [path.relative_to(ROOT) for room in (*ROOMS, OUTSIDE) for path in (ROOT / room).rglob("*.py")]
    sources = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}
    modules = set(sources) - {*ROOMS, OUTSIDE}
    return {
        name: imports_of(ast.parse(path.read_text(encoding="utf-8")).body, modules) for name, path in sources.items()
    }


@pytest.fixture(scope="module")
def known(imports_of_all: dict[str, Imports]) -> Graph:
    """The product modules that each module imports, also for types alone."""
    return {name: its.found | its.for_types for name, its in imports_of_all.items()}


def room_of(module: str) -> str:
    """Return the nearest room in `MAY_IMPORT`."""
    while module and module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module or pytest.fail("a module stands in no room")


def test_rooms_import_one_way(known: Graph) -> None:
    upwards = [
        f"{name} imports {other}"
        for name, others in known.items()
        for other in sorted(others)
        if room_of(other) not in (room_of(name), *MAY_IMPORT[room_of(name)])
    ]
    assert upwards == []


def test_no_modules_import_each_other_in_a_circle_nor_for_types(known: Graph) -> None:
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_module_that_one_neighbour_alone_imports_is_too_large_to_join_it(known: Graph) -> None:
    joined = [f"{name} joins {only}" for name, only in lone(known).items() if only not in ALONE]
    assert [pair for pair in joined if sum(map(num_lines, pair.split(" joins "))) <= MOST_LINES] == []


def lone(known: Graph) -> dict[str, str]:
    """Return modules with a single importer, in their own folder, except programs."""
    users: dict[str, list[str]] = {}
    for name, others in known.items():
        for other in others:
            users.setdefault(other, []).append(name)
    return {
        name: found[0]
        for name, found in users.items()
        if len(found) == 1 and name.rpartition(".")[0] == found[0].rpartition(".")[0] and "__main__" not in name
    }


def num_lines(module: str) -> int:
    return len((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8").splitlines())


def test_a_lone_module_is_one_that_a_neighbour_imports_and_nobody_else() -> None:
    graph = {"a.b": {"a.c", "a.d", "z.e"}, "a.f": {"a.d"}, "a.c": set[str](), "a.g": {"a.__main__"}}
    assert lone(graph) == {"a.c": "a.b"}


def test_an_import_counts_wherever_it_stands_but_for_mypy() -> None:
    source = """
import a.b
from a import c, of_a
if TYPE_CHECKING:
    import a.d
else:
    import a.e
def later():
    for _ in ():
        with here:
            from a.f import something
class Late:
    try:
        match here:
            case 1:
                import a.h
    except ValueError:
        import a.i
    finally:
        while True:
            import a.j
if __name__ == "__main__":
    import a.g
"""
    modules = {"a", *(f"a.{name}" for name in "bcdefghij")}
    found = imports_of(ast.parse(source).body, modules)
    assert (found.found, found.for_types) == ({"a", *(f"a.{name}" for name in "bcefhij")}, {"a.d"})
