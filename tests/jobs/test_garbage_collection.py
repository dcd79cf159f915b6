from __future__ import annotations

import gc

from swiftbatch.jobs.python_processes import MANY_OBJECTS, rare_garbage_collection


def test_garbage_is_looked_for_seldom_in_the_block_and_as_before_behind_it() -> None:
    before = gc.get_threshold()
    with rare_garbage_collection():
        assert gc.get_threshold() == (MANY_OBJECTS, *before[1:])
    assert gc.get_threshold() == before


def test_where_nobody_looks_for_garbage_nobody_does_in_the_block_either() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_garbage_collection():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
