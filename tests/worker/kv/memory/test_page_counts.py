from __future__ import annotations

import random

import pytest

from swiftbatch.worker.kv.kv_capacity import HORIZON, PAGE, ROOM_BEHIND, Growth, HeldPositions, most_pages, pages_of

HELD = HeldPositions(150, 0.25)


def peak(jobs: list[Growth], held: HeldPositions | None) -> int:
    def of(job: Growth, time: int) -> int:
        return held.of(job.now + time, job.num_shared) if held else job.now + time

    times = range(max(job.left for job in jobs) + 1)
    return max(sum(pages_of(of(job, time)) for job in jobs if job.left >= time) for time in times)


def random_growth(rng: random.Random) -> Growth:
    now = rng.randint(0, 400)
    return Growth(now, now + rng.randint(0, 400), rng.choice((0, now // 2, now + 50)))


def test_a_prompt_that_others_have_too_is_held_whole_and_what_is_behind_it_as_a_text_of_its_own() -> None:
    assert HELD.of(1000) == 150 + 213
    assert HELD.of(1000, 600) == 600 + HELD.of(400)
    assert HELD.of(1000, 1200) == 1000
    assert most_pages([Growth(1000, 1000, 600)], held=HELD) - most_pages([Growth(1000, 1000)], held=HELD) == 7


@pytest.mark.parametrize("held", [None, HELD])
def test_a_plan_is_never_below_what_jobs_take_and_at_most_a_page_a_job_above(held: HeldPositions | None) -> None:
    rng = random.Random(0)
    for _ in range(200):
        jobs = [random_growth(rng) for _ in range(rng.randint(1, 8))]
        assert peak(jobs, held) <= most_pages(jobs, held=held) <= peak(jobs, held) + len(jobs)


def test_short_jobs_beside_long_ones_are_counted_until_they_end() -> None:
    long, short = Growth(0, HORIZON), Growth(0, HORIZON // 16)
    assert most_pages([long]) == most_pages([long, *[short] * 5]) == pages_of(HORIZON) + 1
    assert most_pages([long, *[short] * 20]) > pages_of(HORIZON) + 1


def test_what_lies_behind_the_horizon_is_left_open() -> None:
    assert most_pages([Growth(500, 10**6)] * 3) == most_pages([Growth(500, 500 + HORIZON)] * 3)
    assert most_pages([Growth(10**5, 10**6)]) > pages_of(10**5 + HORIZON - 1)


def test_a_job_takes_room_for_its_positions_and_one_step() -> None:
    assert pages_of(PAGE - ROOM_BEHIND % PAGE) == pages_of(0) + (ROOM_BEHIND % PAGE == 0)
    assert pages_of(10 * PAGE) == pages_of(0) + 10
