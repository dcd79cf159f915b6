"""Models with layer states through GPU forwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates, decode_state, encode_state
from swiftbatch.jobs.file_owner import Identity
from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.exactness.forward_comparisons import compare, random_tree
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session import session as worker_session
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.kernels.cuda.launches import launched
from tests.worker.kernels.kernel_parts import path_to
from tests.worker.model.test_hybrid_configs import PUBLISHED, TEXT, publish
from tests.worker.model.test_kinds_engines import decode
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import (
    claimed,
    digest,
    have_caches_loaded,
    make_run,
    record,
    session,
    to_the_end,
    undisturbed_digest,
    until,
)

pytestmark = pytest.mark.long

SLOW = pytest.mark.slow
LONGEST = 6 * BLOCK
FIRST = 4 * BLOCK
ON_A_GPU = (
    *("Falcon-H1", "Falcon-H1 with norms", "Nemotron-H", "Nemotron 3 Nano", "Nemotron 3 Super"),
    *("Granite 4 h", "Granite 4 h micro", "Bamba", "LFM2", "Qwen3.5", "Qwen3-Next"),
)
FEWER_LAYERS: dict[str, dict[str, Any]] = {  # of the kinds tried daily, because the interpreter is slow
    "LFM2": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
    "Qwen3.5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
    },
}
FORMS = ["LFM2", *(pytest.param(name, marks=SLOW) for name in ("Bamba", "Qwen3.5"))]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def made(name: str, folder: Path, dtype: str = "bf16", num_slots: int = 3, num_rows: int = NUM_ROWS) -> TargetModel:
    publish(PUBLISHED[name] | FEWER_LAYERS.get(name, {}), folder)
    linear: LinearName = "triton" if dtype == "bf16" else "cublas"
    return cuda_target(locate_model(str(folder)), DTYPES[dtype], num_slots, LONGEST, linear, num_rows=num_rows)


def read(target: TargetModel, cache: FullKVCache, end: int) -> None:
    while cache.length < end:
        target.read(cache, (2 * TEXT)[cache.length : end])


def caches(target: TargetModel, count: int) -> list[FullKVCache]:
    return [target.new_cache(LONGEST) for _ in range(count)]


def next_logits(target: TargetModel, cache: FullKVCache, token_id: int = 5) -> torch.Tensor:
    [outputs] = target.verify([tree_rows(cache, token_id, DraftTree())])
    logits = outputs.logits[0].clone()
    cache.commit([])
    return logits


@pytest.mark.parametrize("name", FORMS)
def test_forwards_of_all_widths_have_the_same_bits(name: str, tmp_path: Path) -> None:
    found: list[torch.Tensor] = []
    for num_rows in (NUM_ROWS, 2 * NUM_ROWS):
        target, rng = made(name, tmp_path, num_rows=num_rows), random.Random(7)
        own = caches(target, 3)
        for number, each in enumerate(own):
            read(target, each, BLOCK + 20 * number)
        trees = [random_tree(rng, NUM_ROWS // 2 - 1, BLOCK - 40, target.vocab_size) for _ in own]
        outputs = target.verify([tree_rows(cache, 5, tree) for cache, tree in zip(own, trees, strict=True)])
        found += [torch.cat([each.logits for each in outputs]), next_logits(target, own[0])]
    assert target.forwards.narrow_rows == (NUM_ROWS,)
    assert len(found[0]) > NUM_ROWS
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_forward_that_finds_no_memory_is_repeated_with_the_states_that_it_should_have_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = made("Qwen3.5", tmp_path)
    ours, plain = caches(target, 2)
    for each in (ours, plain):
        each.clear()
        each.advance(FIRST)
        read(target, each, FIRST + BLOCK)  # the next row's forward stores the state at this boundary

    def full(graph: CheckedGraph) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CheckedGraph, "replay", full)
        with pytest.raises(torch.OutOfMemoryError):
            next_logits(target, ours)
    assert next_logits(target, ours).equal(next_logits(target, plain))
    found, expected = ours.states(), plain.states()
    assert found is not None
    assert expected is not None
    assert found.num_positions == expected.num_positions == FIRST + BLOCK
    assert all((found.arrays[name] == array).all() for name, array in expected.arrays.items())


@pytest.mark.parametrize(
    ("name", "num_rows"), [("Qwen3.5", 70), *(pytest.param(name, 200, marks=SLOW) for name in ON_A_GPU)]
)
def test_choices_are_those_of_transformers(name: str, num_rows: int, tmp_path: Path) -> None:
    target = made(name, tmp_path, "fp32", 1)
    found = compare(target, num_rows)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == num_rows
    assert target.forwards.numerics.endswith(", states 1")


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("Qwen3.5", 1), *(pytest.param(name, 12, marks=SLOW) for name in ON_A_GPU)],
)
def test_rows_of_trees_beside_others_have_the_bits_of_plain_decoding(name: str, num_steps: int, tmp_path: Path) -> None:
    """Rows lie on both sides of a boundary, after another path than the first was accepted."""
    target = made(name, tmp_path)
    ours, plain, others = caches(target, 3)
    for each in (ours, plain):  # after zeros, until steps reuse the first places
        each.clear()
        each.advance(FIRST)
    read(target, ours, FIRST + BLOCK - 4)
    for end in (17, BLOCK - 4):  # in other parts
        read(target, plain, FIRST + end)
    read(target, others, 3)
    numbers = random.Random(4)
    while num_steps or ours.length < FIRST + BLOCK + 2:
        num_steps = max(0, num_steps - 1)
        tree, beside = (random_tree(numbers, 9, max_tree_depth(each.length), 90) for each in (ours, others))
        groups = [tree_rows(others, 7, beside), tree_rows(ours, 5, tree)]
        logits = target.verify(groups[:: 1 if num_steps % 2 else -1])[num_steps % 2].logits.clone()
        path = path_to(tree, numbers.randrange(3, 9)) if len(tree) > 3 else []
        ours.commit(path)
        others.commit([])
        for row, token_id in [(0, 5), *((1 + node, tree.token_ids[node]) for node in path)]:
            assert torch.equal(next_logits(target, plain, token_id), logits[row])
    assert ours.length == plain.length
    assert ours.boundary >= FIRST + BLOCK, "the boundary has moved"


@pytest.mark.parametrize("name", FORMS)
def test_states_go_through_checkpoints_copies_and_roll_backs_bit_for_bit(name: str, tmp_path: Path) -> None:
    target = made(name, tmp_path)
    source, ours, plain = caches(target, 3)
    read(target, plain, 70)
    source.retain(0, BLOCK)
    read(target, source, 140)
    expected = next_logits(target, plain)

    ours.copy_from(source, source.copyable_end(70))
    assert ours.boundary == ours.length == BLOCK, "from the device"
    read(target, ours, 70)
    assert torch.equal(next_logits(target, ours), expected)

    states = source.states_at(BLOCK)
    assert states is not None
    bits = bytes(encode_state(states.arrays, Identity(job_id="j", fingerprint="f")))
    ours.roll_back(0)
    ours.load(source.kv(0, 69))
    ours.set_states(LayerStates(BLOCK, decode_state(bits)))
    read(target, ours, 70)
    assert torch.equal(next_logits(target, ours), expected)

    source.roll_back(70)  # by more than a block, to where its first state is kept
    assert (source.length, source.boundary) == (70, BLOCK)
    assert torch.equal(next_logits(target, source), expected)
    source.roll_back(30)
    assert (source.length, source.boundary) == (0, 0)
    read(target, source, 70)
    assert torch.equal(next_logits(target, source), expected)


def test_states_are_kept_where_others_will_ask_or_a_text_goes_back(tmp_path: Path) -> None:
    target = made("LFM2", tmp_path, "fp32")
    source, ours, plain = caches(target, 3)
    source.retain(0, 70)
    source.retain(-BLOCK)
    read(target, source, 3 * BLOCK + 4)
    read(target, plain, 70)
    assert source.copyable_end(70) == BLOCK
    ours.copy_from(source, BLOCK)
    read(target, ours, 70)
    expected = next_logits(target, plain)
    assert torch.equal(next_logits(target, ours), expected)
    source.roll_back(70)
    assert source.length == BLOCK
    read(target, source, 70)
    assert torch.equal(next_logits(target, source), expected)


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = made("LFM2", tmp_path)
    ours, other = caches(target, 2)
    read(target, other, BLOCK + 1)
    states = other.states()
    assert states is not None
    with pytest.raises(ValueError, match="expected 2 behind a multiple of 64, at most 0"):
        ours.set_states(states)
    ours.load(other.kv(0, BLOCK))
    states.arrays["inputs.0"] = states.arrays["inputs.0"][:1]
    with pytest.raises(ValueError, match=r"found int16 \[1, 128\] as a part of a layer's state"):
        ours.set_states(states)


@pytest.mark.parametrize("name", FORMS)
def test_drafts_beside_another_job_with_the_same_prompt_give_plain_decoding_s_tokens(name: str, tmp_path: Path) -> None:
    target = made(name, tmp_path)
    params = SamplingParams(max_tokens=3, seed=3, ignore_eos=True)

    def sequences() -> list[Sequence]:
        prompt = TEXT[: BLOCK + 2]
        return [Sequence(f"s{each}", [*prompt, each, 5], params, target.vocab_size) for each in (3, 4)]

    plain = [decode(target, "autoregressive", [text])[0] for text in sequences()]
    assert decode(target, "token-recycling", sequences()) == plain


def test_a_slot_takes_what_the_plan_counts(tmp_path: Path) -> None:
    target = made("Qwen3.5", tmp_path, num_slots=2)
    sizes, arena = read_sizes(target.files, "bfloat16"), target.forwards.arena
    assert sizes is not None
    assert arena.states.states.nbytes + arena.states.steps.nbytes == 2 * sizes.state_bytes


FRONT, PRODUCTS = ["add_norm_row"], ["add_norm_row", "aten.mm.out", "activate_row", "aten.mm.out"]
STATE = ["aten.mm.out", "aten.mm.out", "ready_head", "weigh_path", "walk_rows", "finish_group", "aten.mm.out"]
CONVOLUTION = ["aten.mm.out", "gate_convolution", "aten.mm.out"]
ATTENTION = ["aten.mm.out", "rope_store_heads", "prefix_split", "tail_merge", "gate_row", "aten.mm.out"]


def test_a_layer_with_a_state_is_twelve_launches_and_a_convolution_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, gated = [*FRONT, *STATE, *PRODUCTS], [*FRONT, *ATTENTION, *PRODUCTS]
    short, plain = [*FRONT, *CONVOLUTION, *PRODUCTS], [name for name in gated if name != "gate_row"]
    assert (len(state), len(gated), len(short)) == (12, 11, 8)
    expected = {"Qwen3.5": [*state, *gated], "LFM2": [*short, *plain]}
    for name, layers in expected.items():
        (tmp_path / name).mkdir()
        forwards = made(name, tmp_path / name, "fp32").forwards
        assert isinstance(forwards, CudaForwards)
        names = launched(monkeypatch, forwards._decoder.forward)
        assert names == ["embed_row", *layers, "add_norm_row", "aten.mm.out"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "bamba", "qwen3_5_text"])
@pytest.mark.parametrize("engine", ["auto", "suffix"])
def test_a_job_resumes_from_its_states_with_the_tokens_of_plain_decoding(
    kind: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(files: ModelFiles, *_: Any) -> TargetModel:
        return cuda_target(files, torch.float32, 2, 260, "cublas")

    monkeypatch.setattr(worker_session, "step_costs_of", lambda target: free_rows)
    monkeypatch.setattr(TargetModel, "load", load)
    have_caches_loaded(monkeypatch)
    model, run, job = (
        save_recurrent_model(tmp_path / "model", kind),
        make_run(tmp_path / "run"),
        record("fox and " * 20, 40),
    )
    first = session(run, model, engine=engine, checkpoint="state")
    until(first, job, 25, claimed(run, job))
    first.drain(30.0)
    second = session(run, model, engine=engine, checkpoint="state")
    assert to_the_end(second, claimed(run, job)).of("finished")
    assert second.engine.counters.num_resumes == {"kv": 1}
    assert digest(run, job) == undisturbed_digest(tmp_path / "plain", model, job)
