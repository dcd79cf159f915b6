"""The sample of cases that `make test` runs of a large grid."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conftest import leave_out_all_but_a_sample


class Case:
    """A collected case of a test, with its marks."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
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
