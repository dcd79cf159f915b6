from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.run.shards import PlannedLine, SizedLine, packed

SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=30)


def sized(sizes: list[tuple[int, int]]) -> list[SizedLine]:
    return [
        SizedLine(PlannedLine(custom_id=str(number), jobs=tuple(f"{number}-{i}" for i in range(num_choices))), size)
        for number, (num_choices, size) in enumerate(sizes)
    ]


@given(sizes=SIZES, max_rows=st.integers(1, 6), max_bytes=st.integers(1, 60), takes_all=st.booleans())
def test_every_line_is_in_one_shard_or_waits_and_none_is_too_large(
    sizes: list[tuple[int, int]], max_rows: int, max_bytes: int, takes_all: bool
) -> None:
    lines = sized(sizes)
    full, num_waiting = packed(lines, max_rows, takes_all, max_bytes)
    taken = [line for shard in full for line in shard]
    left = [each.line for each in lines[len(taken) :]]
    assert taken == [each.line for each in lines[: len(taken)]]
    assert num_waiting == sum(len(line.jobs) for line in left)
    assert not (takes_all and left)
    num_bytes = {each.line.custom_id: each.num_bytes for each in lines}
    for shard in full:
        assert len(shard) == 1 or sum(len(line.jobs) for line in shard) <= max_rows
        assert len(shard) == 1 or sum(num_bytes[line.custom_id] for line in shard) <= max_bytes
    assert num_waiting < max_rows
    assert sum(num_bytes[line.custom_id] for line in left) < max_bytes


def test_a_shard_closes_at_its_rows_or_before_at_its_bytes() -> None:
    lines = sized([(1, 10)] * 5)
    assert [len(shard) for shard in packed(lines, 2, False, 1000)[0]] == [2, 2]
    assert [len(shard) for shard in packed(lines, 9, False, 25)[0]] == [2, 2]
    assert packed(lines, 9, False, 1000) == ([], 5)
