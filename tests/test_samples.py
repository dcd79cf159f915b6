"""The cases of large grids that `make test` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.conftest import in_order, leave_out_all_but_a_sample


class Case:
    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.path = nodeid, Path(nodeid.partition("::")[0])
        self._marks = list(marks)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self._marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self._marks.append(mark)


def test_one_case_of_each_n_is_left_and_all_of_a_test_without_the_mark() -> None:
    half, slow = pytest.mark.sample(2), pytest.mark.slow
    cases = [Case(f"a.py::test[{i}]", half) for i in range(5)] + [Case("a.py::other[0]"), Case("a.py::other[1]")]
    cases.insert(0, Case("a.py::test[slow]", half, slow))  # which takes nobody's place
    leave_out_all_but_a_sample(cast("list[pytest.Item]", cases))
    left = [case.nodeid for case in cases if not case.get_closest_marker("slow")]
    assert left == ["a.py::test[0]", "a.py::test[2]", "a.py::test[4]", "a.py::other[0]", "a.py::other[1]"]


def test_files_that_wait_are_spread_among_those_that_compute_and_the_driver_s_begin_early() -> None:
    ray, long, driver = pytest.mark.ray, pytest.mark.long, "tests/scheduler/driver"
    cases = [Case("tests/a.py::short"), Case(f"{driver}/a.py::one"), Case(f"{driver}/b.py::two", ray)]
    cases += [Case(f"tests/worker/{number}.py::test", long) for number in range(4)]
    cases += [Case("tests/r.py::short"), Case("tests/s.py::test", ray), Case("tests/r.py::waits", ray)]
    found = [case.nodeid.removeprefix("tests/") for case in in_order(cast("list[pytest.Item]", cases))]
    drivers = ["scheduler/driver/a.py::one", "scheduler/driver/b.py::two"]
    waiting = ["r.py::short", "r.py::waits"]
    assert found[:5] == [*waiting, "worker/0.py::test", *drivers]
    assert found[5:] == ["worker/1.py::test", "s.py::test", "worker/2.py::test", "worker/3.py::test", "a.py::short"]
