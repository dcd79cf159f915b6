"""In layers with states rows have the same bits in trees, prompts and alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates, decode_state, encode_state
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.file_owner import Identity
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.exactness.forward_comparisons import random_tree
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import NUM_STEPS
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import path_to
from tests.worker.model.kind_parts import native_target, tiny_target
from tests.worker.model.kind_sizes import VOCAB_SIZE, WITH_STATES
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import (
    claimed,
    digest,
    make_run,
    record,
    run_to_end,
    session,
    undisturbed_digest,
    until,
)

NATIVE = [  # kinds that our kernels run whole: one of each form, and the others
    *("bamba", "lfm2", "qwen3_5_text"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("falcon_h1", "lfm2_moe", "nemotron_h")),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5_moe_text", "qwen3_next")),
]
OFTEN, SLOW = ("falcon_h1", "kimi_linear", "lfm2", "qwen3_next"), pytest.mark.slow  # one of each form, and the others


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target("qwen3_5_text")


def caches(target: TargetModel) -> tuple[FullKVCache, FullKVCache]:
    ours, plain = target.new_cache(900), target.new_cache(900)
    return ours, plain


def decode(target: TargetModel, cache: FullKVCache, token_id: int) -> torch.Tensor:
    [outputs] = target.verify([tree_rows(cache, token_id, DraftTree())])
    cache.commit([])
    return outputs.logits[0]


def assert_same_states(ours: FullKVCache, plain: FullKVCache) -> None:
    assert ours.length == plain.length
    for one, other in zip(ours.layer_states.layers, plain.layer_states.layers, strict=True):
        assert torch.equal(one.state, other.state)
        assert torch.equal(one.at(ours.length - ours.boundary).inputs, other.at(plain.length - plain.boundary).inputs)
        assert one.inputs.abs().max() > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in OFTEN else SLOW) for kind in WITH_STATES])
def test_accepted_paths_of_trees_leave_the_states_of_plain_decoding(kind: str) -> None:
    check_accepted_paths(tiny_target(kind))


@pytest.mark.long
@pytest.mark.skipif(chosen_variant() is None, reason="no kernels run here")
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
def test_accepted_paths_leave_the_states_of_plain_decoding_where_kernels_run_all_of_it(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    target = native_target(kind, tmp_path, dtype)
    assert target.forwards.numerics.startswith("cpu native ")
    check_accepted_paths(target)


@pytest.mark.long
@pytest.mark.skipif(chosen_variant() is None, reason="no kernels run here")
@pytest.mark.parametrize("kind", ["falcon_h1", "kimi_linear", "qwen3_5_text"])
def test_accepted_paths_leave_the_states_of_plain_decoding_in_our_kernels_too(kind: str) -> None:
    torch.set_num_threads(1)
    target = tiny_target(kind, torch.bfloat16, variant=chosen_variant())
    assert target.forwards.numerics.endswith(" attention, native f32 1 states")
    check_accepted_paths(target)


def check_accepted_paths(target: TargetModel) -> None:
    rng = random.Random(1)
    ours, plain = caches(target)
    for cache in (ours, plain):
        while cache.length < 2 * BLOCK - 20:
            target.read(cache, TEXT[cache.length : 2 * BLOCK - 20])
    for _ in range(7):
        root = rng.randrange(VOCAB_SIZE)
        tree = random_tree(rng, rng.randrange(1, 16), max_tree_depth(ours.length), VOCAB_SIZE)
        [outputs] = target.verify([tree_rows(ours, root, tree)])
        path = path_to(tree, rng.randrange(-1, len(tree)))
        ours.commit(path)
        for row in [0, *(node + 1 for node in path)]:
            token_id = root if row == 0 else tree.token_ids[row - 1]
            assert torch.equal(decode(target, plain, token_id), outputs.logits[row])
        assert_same_states(ours, plain)
    assert ours.boundary >= BLOCK, "the boundary has moved"


def test_a_prompt_that_is_read_in_tiles_leaves_the_states_of_plain_decoding(target: TargetModel) -> None:
    ours, plain = caches(target)
    token_ids = [(7 * i + 3) % VOCAB_SIZE for i in range(2 * BLOCK + 5)]
    while ours.length < len(token_ids):
        target.read(ours, token_ids[ours.length :])
    for token_id in token_ids:
        decode(target, plain, token_id)
    assert_same_states(ours, plain)


def test_the_last_block_can_be_rolled_back_exactly(target: TargetModel) -> None:
    ours, plain = caches(target)
    read(target, plain, BLOCK + 6)
    for token_id in [*TEXT[: BLOCK + 6], *range(20)]:
        decode(target, ours, token_id)
    ours.roll_back(BLOCK + 6)
    assert_same_states(ours, plain)
    begun, _ = caches(target)
    read(target, begun, 3)
    ours.roll_back(3)  # a whole block would hide the state at its beginning
    assert_same_states(ours, begun)


def test_a_cache_that_is_rolled_back_further_is_empty_and_is_read_again(target: TargetModel) -> None:
    ours, plain = caches(target)
    for token_id in [*range(BLOCK), *range(BLOCK)]:
        decode(target, ours, token_id)
    assert ours.boundary == BLOCK
    ours.roll_back(ours.boundary - 1)
    assert ours.length == 0
    for cache in (ours, plain):
        read(target, cache, BLOCK + 2)
    assert torch.equal(decode(target, ours, 5), decode(target, plain, 5))
    assert_same_states(ours, plain)


TEXT = [(7 * i + 3) % VOCAB_SIZE for i in range(300)]


def read(target: TargetModel, cache: FullKVCache, end: int) -> None:
    while cache.length < end:
        target.read(cache, TEXT[cache.length : end])


def test_a_cache_that_may_return_goes_on_from_states_that_it_has_kept(target: TargetModel) -> None:
    ours, plain = caches(target)
    ours.retain(-100)
    read(target, ours, 300)
    ours.roll_back(150)
    assert ours.length == 2 * BLOCK
    for cache in (ours, plain):
        read(target, cache, 150)
    assert torch.equal(decode(target, ours, 5), decode(target, plain, 5))
    assert_same_states(ours, plain)
    ours.roll_back(BLOCK)
    assert ours.length == ours.copyable_end(300) == 0, "a state of what is taken back is nobody's"


@pytest.mark.parametrize(("length", "expected"), [(300, 128), (260, 192), (150, 128)])
def test_a_copy_goes_on_as_a_cache_that_has_read_the_same(target: TargetModel, length: int, expected: int) -> None:
    """The copy continues from a state kept in time, or from a near boundary."""
    source, ours, plain = target.new_cache(900), *caches(target)
    source.retain(0, 140)
    read(target, source, length)
    end = source.copyable_end(min(length, 255 if expected == 192 else 140))
    assert end == expected
    ours.copy_from(source, end)
    for cache in (ours, plain):
        read(target, cache, 250)
    assert_same_states(ours, plain)
    assert torch.equal(decode(target, ours, 5), decode(target, plain, 5))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen3_5_text", torch.float32), ("qwen3_5_text", torch.bfloat16), ("kimi_linear", torch.bfloat16)],
)
def test_states_go_through_a_checkpoint_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    target = tiny_target(kind, dtype)
    ours, plain = caches(target)
    read(target, plain, 200)
    states = plain.states()
    assert states is not None
    assert states.num_positions == 2 * BLOCK
    identity = Identity(job_id="j", fingerprint="f")
    again = LayerStates(states.num_positions, decode_state(bytes(encode_state(states.arrays, identity))))
    ours.load(plain.kv(0, 190))
    ours.set_states(again)
    assert ours.length == 2 * BLOCK
    read(target, ours, 200)
    assert_same_states(ours, plain)
    for token_id in (5, 6):
        assert torch.equal(decode(target, ours, token_id), decode(target, plain, token_id))


def test_states_that_do_not_fit_are_refused(target: TargetModel) -> None:
    ours, plain = caches(target)
    read(target, plain, 130)
    states = plain.states()
    assert states is not None
    with pytest.raises(ValueError, match="expected 4 behind a multiple of 64, at most 0"):
        ours.set_states(states)
    ours.load(plain.kv(0, 130))
    states.arrays["state.1"] = states.arrays["state.1"][:1]
    with pytest.raises(ValueError, match=r"found float32 \[1, 16, 16\] as a part of a layer's state"):
        ours.set_states(states)


def test_the_largest_tree_behind_the_longest_way_from_a_boundary_has_room() -> None:
    assert NUM_STEPS > 2 * BLOCK - 1 + 127


def test_costs_are_measured_without_a_text(target: TargetModel) -> None:
    assert measure_step_costs(target).at(1, 64) > 0


def test_an_engine_whose_drafts_read_a_part_of_a_cache_is_refused(target: TargetModel) -> None:
    with pytest.raises(ModelError, match=r"engine griffin: .* has layers with a state in place of one"):
        create_drafter("griffin", target, lambda: measure_step_costs(target))


@pytest.fixture(scope="module")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recurrent_model(tmp_path_factory.mktemp("recurrent-model"))


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "suffix"])
def test_a_job_resumes_from_its_tokens_with_the_same_tokens(recurrent_model: Path, tmp_path: Path, engine: str) -> None:
    run, jobs = make_run(tmp_path / "run"), [record("fox", 120), record("dog", 90)]
    first = session(run, recurrent_model, engine=engine, checkpoint="state")
    until(first, jobs[0], 50, *(claimed(run, job) for job in jobs))
    first.drain(30.0)
    second = run_to_end(run, recurrent_model, *jobs, engine=engine, checkpoint="state")
    assert second.engine.counters.num_resumes == {"replay": 2}
    for number, job in enumerate(jobs):
        assert digest(run, job) == undisturbed_digest(tmp_path / f"plain-{number}", recurrent_model, job)
