from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import pytest

from swiftbatch.worker.kernels.native_library import Team, load_library, shared_team
from tests.worker.kernels.kernel_parts import (
    SHAPES,
    VARIANTS,
    chain,
    native,
    needs_kernels,
    random_cache,
    random_partial_rows,
)

pytestmark = needs_kernels


def test_weights_are_freed_behind_the_next_call_and_the_others_stay() -> None:
    decoder, freed = native(SHAPES[0], VARIANTS[0]), []
    decoder.team.retire(freed.append, 5)
    assert freed == []
    decoder.forward([chain(random_cache(SHAPES[0], 10), [1, 2])])
    assert freed == [5]
    decoder.forward([chain(random_cache(SHAPES[0], 10), [1, 2])])
    assert freed == [5]


def test_weights_are_freed_with_their_team() -> None:
    team, freed = Team(load_library(VARIANTS[0]), 2), []
    team.retire(freed.append, 6)
    assert freed == []
    del team
    assert freed == [6]


@pytest.mark.parametrize("is_late", [True, False])
def test_caches_and_biases_stay_just_while_a_late_helper_may_read_them(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = native(SHAPES[0], VARIANTS[0])
    monkeypatch.setattr(decoder.team, "library", SimpleNamespace(team_is_busy=lambda _: is_late))
    rows = random_partial_rows(random.Random(1), SHAPES[0], 300, 3)
    assert rows.biases is not None
    read = [weakref.ref(rows.biases), weakref.ref(rows.cache)]
    decoder.forward([rows])
    del rows
    gc.collect()
    decoder.forward([chain(random_cache(SHAPES[0], 10), [1, 2])])
    assert [each() is not None for each in read] == [is_late, is_late]


def test_all_who_compute_with_as_many_threads_of_a_library_share_a_team_while_one_of_them_lives() -> None:
    library, num_threads = load_library(VARIANTS[0]), 61  # no other test's decoder has as many
    team = shared_team(library, num_threads)
    assert shared_team(library, num_threads) is team
    assert shared_team(library, num_threads - 1) is not team
    alive = weakref.ref(team)
    del team
    gc.collect()
    assert alive() is None
