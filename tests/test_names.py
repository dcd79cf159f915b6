"""Each name means one thing; checked in the sources."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from tests import ROOT
from tests.test_rooms import OUTSIDE, ROOMS

OF_EACH_BENCH = {"Options"}  # `python -m bench` finds them by it
SAME_IN_EACH = {  # each paper, benchmark or command has its own
    *("ablation", "catalogue", "plot", "recipe", "tables", "training", "variants"),
    "__main__",
}


def classes_of(source: str) -> list[str]:
    return re.findall(r"^class ([^\W_]\w*)", source, re.MULTILINE)


def test_a_class_s_name_stands_for_one_class_in_the_whole_project() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in (path for room in (*ROOMS, OUTSIDE) for path in (ROOT / room).rglob("*.py")):
        for name in classes_of(path.read_text(encoding="utf-8")):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in OF_EACH_BENCH} == {}


def test_a_module_s_name_stands_for_one_module_in_its_room() -> None:
    for room in (*ROOMS, OUTSIDE):
        names = [path.stem for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
        assert {name for name, number in Counter(names).items() if number > 1} <= SAME_IN_EACH


def test_classes_are_found() -> None:
    assert classes_of("class A: ...\nclass _B: ...\ndef f():\n    class C: ...\n") == ["A"]
