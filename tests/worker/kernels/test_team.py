"""Weights of a team's calls are freed once nobody may look at them: behind a call, or with the team."""

from __future__ import annotations

from tests.worker.kernels.kernel_parts import SHAPES, VARIANTS, chain, native, needs_kernels, random_cache
from worker.kernels.team import Team
from worker.kernels.variants import load_library

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
