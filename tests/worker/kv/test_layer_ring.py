"""Two device layers serve as all."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch

from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoom, KVRoomError
from swiftbatch.worker.kv.kv_offload import PinnedMemory
from tests.worker.kv.cache_parts import shape
from tests.worker.kv.lazy_stream import LazyStream
from tests.worker.kv.ring_parts import LENGTH, EagerLane, Pair, RingForwards

LANES = [LazyStream, EagerLane]


@pytest.fixture(params=[(coming, going) for coming in LANES for going in LANES], ids=lambda lanes: lanes[0].__name__)
def new_forwards(request: pytest.FixtureRequest) -> Callable[[int], RingForwards]:
    coming, going = request.param
    return lambda num_layers: RingForwards(num_layers, coming(), going())


def same_rows(pair: Pair) -> bool:
    length = pair.theirs.length
    return pair.ours.length == length and bool((pair.ours.kv(0, length) == pair.theirs.kv(0, length)).all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_any_use_finds_the_rows_of_a_cache_on_the_device(
    new_forwards: Callable[[int], RingForwards], num_layers: int, seed: int
) -> None:
    """Trees, texts, split trees, steps back, resumes, views and new jobs."""
    rng, forwards = random.Random(seed), new_forwards(num_layers)
    torch.manual_seed(seed)
    pairs = [forwards.pair(), forwards.pair()]
    for _ in range(60):
        for slot in range(len(pairs)):
            if pairs[slot].ours.length > LENGTH - 60 or rng.random() < 0.05:
                del pairs[slot]
                pairs.append(forwards.pair())
        use = USES[rng.choice(list(USES))]
        use(forwards, list(pairs) if rng.random() < 0.6 else [rng.choice(pairs)], rng)
        if rng.random() < 0.2:
            forwards.finish()
        if rng.random() < 0.3:
            assert all(same_rows(pair) for pair in pairs)
    forwards.finish()
    assert all(same_rows(pair) for pair in pairs)
    assert forwards.num_wrong == 0


def take_a_step(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    sizes = [rng.randrange(1, 20) for _ in pairs]
    paths = [sorted(rng.sample(range(size - 1), rng.randrange(size))) for size in sizes]
    forwards.step(pairs, sizes, paths)


def read_a_text(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    """Wait for nothing between blocks."""
    for _ in range(3):
        num_rows = rng.randrange(1, 12)
        forwards.forward([(pair, pair.ours.length, num_rows) for pair in pairs])
        for cache in (cache for pair in pairs for cache in pair):
            cache.advance(num_rows)


def take_a_step_in_two_parts(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    forwards.forward([(pair, pair.ours.length, 6) for pair in pairs])
    forwards.forward([(pair, pair.ours.length + 6, 5) for pair in pairs])
    for cache in (cache for pair in pairs for cache in pair):
        cache.commit([2, 7])


def go_back(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    for pair in pairs:
        length = rng.randrange(pair.ours.length + 1)
        for cache in pair:
            cache.roll_back(length)


def resume(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    for pair in pairs:
        length = rng.randrange(pair.ours.length + 1)
        kv = pair.theirs.kv(length, pair.theirs.length)[:, ::-1].copy()
        for cache in pair:
            cache.roll_back(length)
            cache.load(kv)


def run_again(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    for pair in pairs:
        length = rng.randrange(max(1, pair.ours.length - 4))
        with pair.ours.replayed(length, 3) as ours, pair.theirs.replayed(length, 3) as theirs:
            if pair.ours.length > length + 3:
                forwards.forward([(Pair(ours, theirs), length, 1)])
                for view in (ours, theirs):
                    view.advance(1)
                forwards.forward([(Pair(ours, theirs), length + 1, 2)])


def look(forwards: RingForwards, pairs: list[Pair], rng: random.Random) -> None:
    """Compare a late view of a device layer, and one of a host layer."""
    for pair in pairs:
        layer, length = rng.randrange(forwards.shape.num_layers), pair.ours.length
        expected = torch.stack(pair.theirs.layer(layer))[:, :, :length].clone()
        shown = torch.stack(pair.ours.stored(layer))[:, :, :length]
        forwards.num_wrong += not shown.equal(expected)
        keys, values = pair.ours.layer(layer)

        def compare(
            keys: torch.Tensor = keys, values: torch.Tensor = values, expected: torch.Tensor = expected
        ) -> None:
            forwards.num_wrong += not torch.stack([keys, values])[:, :, : expected.shape[2]].equal(expected)

        forwards.computation.submit(compare)


USES: dict[str, Callable[[RingForwards, list[Pair], random.Random], None]] = {
    "step": take_a_step,
    "text": read_a_text,
    "two parts": take_a_step_in_two_parts,
    "back": go_back,
    "resume": resume,
    "again": run_again,
    "look": look,
}


def test_a_new_job_finds_nothing_of_the_one_that_had_its_slot() -> None:
    forwards = RingForwards(4, LazyStream(), LazyStream())
    pairs = [forwards.pair()]
    forwards.step(pairs, [90], [list(range(89))])
    forwards.step(pairs, [1], [[]])
    pairs.clear()
    pair = forwards.pair()
    for layer in range(4):
        for ours, theirs in zip(pair.ours.stored(layer), pair.theirs.stored(layer), strict=True):
            ours.copy_(theirs.normal_())
    for cache in pair:
        cache.advance(60)
    forwards.step([pair], [1], [[]])
    assert forwards.num_wrong == 0


class CountingLane(EagerLane):
    """Records the positions of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous()
        assert source.is_contiguous()
        self.lengths.append(len(source))
        super().copy(target, source)


def test_a_layer_is_one_run_here_and_one_home_for_each_slot_that_runs() -> None:
    coming, going = CountingLane(), CountingLane()
    forwards = RingForwards(5, coming, going)
    pair, other = forwards.pair(), forwards.pair()
    for _ in range(3):
        forwards.step([pair], [100], [list(range(79))])
    forwards.step([other], [3], [[]])
    for lane in (coming, going):
        lane.lengths.clear()
    forwards.step([pair], [6], [[0, 1]])
    assert sorted(coming.lengths[:2]) == [80, 80], "of the first layers the newest rows; the others came before"
    assert coming.lengths[2:] == [240] * 5, "three more layers, and the first two of the next step"
    assert going.lengths == [6] * 5


def test_a_model_of_two_layers_brings_new_rows_alone() -> None:
    coming = CountingLane()
    forwards = RingForwards(2, coming, LazyStream())
    pair = forwards.pair()
    for _ in range(3):
        forwards.step([pair], [6], [[1]])
    assert coming.lengths == [2] * 4


def test_whoever_reads_layer_by_layer_finds_the_next_one_there() -> None:
    coming = CountingLane()
    forwards = RingForwards(4, coming, EagerLane())
    pair = forwards.pair()
    forwards.step([pair], [100], [list(range(79))])
    num_brought = []
    for layer in range(3):
        coming.lengths.clear()
        pair.ours.layer(layer)
        num_brought.append(coming.lengths.copy())
    assert num_brought == [[80, 80], [80], [80]]


def test_memory_is_given_back_when_nobody_copies_or_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, released = [LazyStream(), LazyStream()], []
    forwards = RingForwards(4, *lanes)
    lanes.append(forwards.computation)  # rounds read it, too
    pair = forwards.pair()
    forwards.step([pair], [9], [[0, 1]])
    forwards.forward([(pair, pair.ours.length, 3)])
    forwards.computation.submit(lambda: None)
    monkeypatch.setattr(PinnedMemory, "release", lambda _: released.append([lane.num_waiting for lane in lanes]))
    del pair
    gc.collect()
    assert released == [[0, 0, 0]]
    assert len(forwards.arena.leases.free) == forwards.arena.num_slots


def test_a_job_takes_the_memory_of_its_own_length_and_not_a_slot_s() -> None:
    forwards = RingForwards(3, LazyStream(), LazyStream())
    cache = forwards.arena.new_cache(50)
    num_bytes = (50 + MAX_TREE_NODES) * shape(3).bytes_per_position()
    assert cache.stored(0)[0].untyped_storage().nbytes() == num_bytes


def test_a_job_that_the_host_has_no_room_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = RingForwards(3, LazyStream(), LazyStream())
    monkeypatch.setattr(KVRoom, "free_bytes", lambda _: 1000)
    with pytest.raises(KVRoomError, match="max_tokens: cannot allocate the key-value cache: 300 positions need"):
        forwards.arena.new_cache(LENGTH)
    assert len(forwards.arena.leases.free) == forwards.arena.num_slots
