"""The next batch is chosen by its owner's recent tokens, then priority and age."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.serve.batches.batch_queue import (
    BEGUN_TOKENS,
    DAY,
    HALF_LIFE,
    Standing,
    Standings,
    Usage,
    next_batch,
    standing_of,
)
from swiftbatch.scheduler.serve.records.api_keys import Rights
from swiftbatch.scheduler.serve.records.server_records import BatchRecord, Counts, Ended
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from tests.work_counts import num_lines

NOW = float(int(time.time()))


def batch(created: float, expires: float = NOW + 10**9, owner: str | None = None, priority: int = 0) -> Batch:
    record = BatchRecord(
        id=f"batch_{created:024.0f}",
        created=created,
        input_file_id="file-1",
        endpoint="/v1/completions",
        completion_window="1h",
        expires=expires,
        owner=owner,
        priority=priority,
    )
    return Batch(record, Store("/nowhere"))


def equal(owner: str | None) -> Standing:
    return Standing()


def test_the_oldest_runs_as_far_as_there_is_room() -> None:
    old, new, running = batch(1), batch(2), batch(0)
    assert next_batch([new, old], [], 1, equal) is old
    assert next_batch([old, new], [running], 1, equal) is None
    assert next_batch([old, new], [running], 2, equal) is old
    assert next_batch([], [], 1, equal) is None


def test_a_lower_priority_runs_before_age() -> None:
    old, new, urgent = batch(1), batch(2), batch(3, priority=-1)
    assert next_batch([old, new, urgent], [], 1, equal) is urgent
    assert next_batch([batch(0, priority=1), old, new], [], 1, equal) is old


def test_one_whose_time_is_up_waits_for_none_but_its_like() -> None:
    late, later, in_time, running = batch(1, NOW), batch(2, NOW - 1), batch(3), batch(0)
    assert next_batch([in_time, late, later], [running], 1, equal) is late
    assert next_batch([in_time, later], [running, late], 1, equal) is None
    assert next_batch([in_time, later], [late], 1, equal) is in_time


def test_who_had_least_lately_comes_first_whatever_others_say_of_priority() -> None:
    loud, quiet = batch(1, owner="a", priority=-9), batch(2, owner="b")
    tokens = {"a": 100.0, "b": 99.0}
    assert next_batch([loud, quiet], [], 1, lambda owner: Standing(tokens[str(owner)])) is quiet
    assert next_batch([loud, quiet], [batch(0, owner="b")], 2, equal) is loud, "whoever runs less, where all is one"


def test_limits_of_one_key_let_others_pass() -> None:
    limited, free, running = batch(1, owner="a"), batch(2, owner="b"), batch(0, owner="a")
    standings = {"a": Standing(0, 500, 500), "b": Standing(10_000, 499, 500)}
    assert next_batch([limited, free], [], 1, lambda owner: standings[str(owner)]) is free
    assert next_batch([limited], [], 1, lambda owner: standings[str(owner)]) is None
    one = Standing(max_running=1)
    assert next_batch([limited], [running], 9, lambda _: one) is None
    assert next_batch([limited, free], [running], 9, lambda _: one) is free
    assert next_batch([limited], [], 9, lambda _: one) is limited
    assert "500 tokens in 24 hours" in str(standings["a"].hindrance(0))


def test_nobody_is_asked_how_owners_stand_while_there_is_no_room() -> None:
    def never(owner: str | None) -> Standing:
        raise AssertionError

    assert next_batch([batch(1)], [batch(0)], 1, never) is None


def test_tokens_weigh_half_as_much_an_hour_later_and_a_day_has_24_hours() -> None:
    at_once = Usage(1000, NOW, NOW)
    assert [at_once.decayed(NOW + n * HALF_LIFE) for n in (0, 1, 2)] == pytest.approx([1000, 500, 250])
    spread = Usage(1000, NOW - 2 * DAY, NOW)
    assert spread.since(NOW - DAY) == 500
    assert spread.since(NOW) == 0
    assert (at_once.since(NOW - 1), at_once.since(NOW + 1)) == (1000, 0)
    parts = [Usage(10, NOW + n, NOW + n + 1) for n in range(100)]
    whole = Usage(1000, NOW, NOW + 100)
    for later in (100, 5000):
        assert whole.decayed(NOW + later) == pytest.approx(sum(part.decayed(NOW + later) for part in parts), rel=1e-6)


def test_an_owner_stands_by_all_its_batches_and_a_running_one_weighs_from_its_begin() -> None:
    rights = Rights(max_running=3, max_tokens_per_day=100)
    ended, begun = Usage(1000, NOW - DAY - 10, NOW - DAY), Usage(0, NOW, NOW)
    standing = standing_of(rights, [ended, Usage(40, NOW, NOW)], [begun], NOW)
    assert standing.recent_tokens == pytest.approx(BEGUN_TOKENS + 40, abs=1)
    assert (standing.tokens_of_day, standing.max_running, standing.max_tokens_per_day) == (40, 3, 100)


def served_tokens(rounds: int, weigh: Callable[[str], int]) -> dict[str, int]:
    """Return each owner's tokens from one place while all have waiting batches."""
    had: dict[str, list[Usage]] = {"a": [], "b": [], "c": []}
    now = NOW
    for number in range(rounds):
        waiting = [batch(number + place / 10, NOW * 2, owner) for place, owner in enumerate(had)]
        chosen = next_batch(
            waiting,
            [],
            1,
            lambda owner: standing_of(Rights(), had[str(owner)], [], now),  # noqa: B023
        )
        owner, began = str(chosen.owner), now
        now += 60
        had[owner].append(Usage(weigh(owner), began, now))
    return {owner: sum(usage.num_tokens for usage in usages) for owner, usages in had.items()}


def test_places_are_shared_by_tokens_not_by_batches() -> None:
    got = served_tokens(600, {"a": 1000, "b": 100, "c": 2000}.__getitem__)
    assert max(got.values()) < 1.5 * min(got.values())


def test_a_server_that_starts_takes_in_many_ended_batches_at_once() -> None:
    ended = Ended(state="completed", counts=Counts(), in_progress=1.0, finalizing=2.0, ended=time.time())

    def num_lines_of(num_batches: int) -> int:
        batches = [batch(number) for number in range(num_batches)]
        for each in batches:
            each.ended = ended
        return num_lines(lambda: Standings(batches, lambda owner: Rights()))

    assert num_lines_of(4000) < 20 * 1.2 * num_lines_of(200)
