"""Every engine gives the same tokens with a GPU's forwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.variants import BENCH_ENGINES, create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import ENGINES, create_drafter, engine_entry, slots_wanted
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.cuda.cuda_loading import drafts_of
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, Costs, StepCosts, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel, check_model
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.cuda_graph import Download, Upload
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory
from swiftbatch.worker.kv.host_copies import ComputingStream, computing_stream
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows, run_together
from tests.worker.engine.test_rewinds import Outcome, run
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

LAUNCHES_PER_LAYER = 10
GPU = GPUMemory(10**9)
# Prompts; crossing the second block or beginning in it takes the interpreter longer.
SHORT, CROSSING, LONG = (6, 18), (6, 62), (30, 50, 70)
SAMPLING = (
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "penalty_window": 20, "frequency_penalty": 1.5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "eta": 1e-3, "bad_words": ("any",), "logit_bias": {"9": 8.0}},
    {"temperature": 0.0, "presence_penalty": 2.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 60, 2))},
)
BAD_WORD_IDS = ((9, 9), (11,))
ENGINES_HERE = pytest.mark.parametrize(
    "engine_name",
    # `test_tokens_do_not_depend_on_what_shares_a_step` compares plain decoding with drafts
    [pytest.param("autoregressive", marks=pytest.mark.slow), "token-recycling"],
)


def sequences(vocab_size: int, num_tokens: int, prompts: tuple[int, ...]) -> list[Sequence]:
    made = []
    for number, fields in enumerate(SAMPLING[: len(prompts)]):
        prompt = [(7 * number + 3 * i) % 50 + 5 for i in range(prompts[number])]
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True, **fields)  # type: ignore[arg-type]
        words = BAD_WORD_IDS if params.bad_words else ()
        made.append(Sequence(str(number), prompt, params, vocab_size, bad_word_ids=words))
    return made


def generated(
    target: TargetModel,
    engine_name: str,
    num_tokens: int,
    prompts: tuple[int, ...] = SHORT,
    num_at_a_time: int = 3,
    costs: Costs = free_rows,
) -> list[list[int]]:
    engine = Engine(target, create_bench_drafter(engine_name, target, costs))
    waiting = sequences(target.vocab_size, num_tokens, prompts)
    outputs = []
    while waiting:
        running, waiting = waiting[:num_at_a_time], waiting[num_at_a_time:]
        run_together(engine, running)
        outputs += [sequence.output_ids.tolist() for sequence in running]
    return outputs


@ENGINES_HERE
def test_engines_give_the_reference_s_tokens(files: ModelFiles, engine_name: str) -> None:
    expected = generated(TargetModel.load(files, "float32", "cpu"), "autoregressive", 3, CROSSING)
    assert generated(cuda_target(files, torch.float32), engine_name, 3, CROSSING) == expected


@pytest.mark.slow  # test_rewinds.py removes loops, test_cuda_states.py frees slots
@ENGINES_HERE
def test_rewound_sequences_have_the_reference_s_tokens(files: ModelFiles, engine_name: str) -> None:
    loop = {"max_pattern_size": 1, "min_count": 3, "action": "rewind", "max_rewinds": 2}
    drawn = {"logit_bias": {"9": 7.0}, "repetition_penalty": 0.95, "presence_penalty": -0.5, "ignore_eos": True}
    params = SamplingParams.model_validate({"max_tokens": 7, "seed": 5, "repetition_detection": loop, **drawn})

    def outcomes(target: TargetModel, engine: str) -> list[Outcome]:
        prompts = ([5, 6, 7], [11, 12, 13, 14, 15])
        return run(target, engine, [Sequence(str(len(ids)), ids, params, target.vocab_size) for ids in prompts])

    expected = outcomes(TargetModel.load(files, "float32", "cpu"), "autoregressive")
    assert sum(len(rewinds) for _, rewinds, _ in expected) >= 2
    assert outcomes(cuda_target(files, torch.float32, 2, linear="cublas"), engine_name) == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_every_engine_gives_the_reference_s_tokens(files: ModelFiles, engine_name: str) -> None:
    expected = generated(TargetModel.load(files, "float32", "cpu"), "autoregressive", 24, LONG)
    assert generated(cuda_target(files, torch.float32, 3), engine_name, 24, LONG) == expected


def test_tokens_do_not_depend_on_what_shares_a_step(files: ModelFiles) -> None:
    together = generated(cuda_target(files, torch.bfloat16), "token-recycling", 3)
    assert generated(cuda_target(files, torch.bfloat16, 1), "autoregressive", 3, num_at_a_time=1) == together


def test_rows_of_several_forwards_are_those_of_each(files: ModelFiles) -> None:
    target = cuda_target(files, torch.bfloat16)
    trees = [DraftTree.chain([(3 * node + first) % 50 + 5 for node in range(39)]) for first in (0, 1)]
    groups = [tree_rows(target.new_cache(60), 7, tree) for tree in trees]
    together = target.verify(groups)
    for group, outputs in zip(groups, together, strict=True):
        [alone] = target.verify([group])
        assert torch.equal(alone.logits, outputs.logits)
        assert torch.equal(alone.hidden, outputs.hidden)


def test_a_step_is_two_replays_and_one_wait(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replay, send, wait = CheckedGraph.replay, Upload.send, Download.wait

    def noted(name: str, call: object) -> object:
        def run(self: object) -> object:
            done.append(name)
            return call(self)  # type: ignore[operator]

        return run

    target = cuda_target(files, torch.float32, linear="cublas")
    engine = Engine(target, create_bench_drafter("token-recycling", target, free_rows))
    engine.start(sequences(target.vocab_size, 4, SHORT)[0])
    engine.step()
    for kind, name, call in ((CheckedGraph, "replay", replay), (Upload, "send", send), (Download, "wait", wait)):
        monkeypatch.setattr(kind, name, noted(name, call))
    monkeypatch.setattr(TargetModel, "synchronize", noted("synchronize", TargetModel.synchronize))
    engine.step()
    assert done == ["send", "replay", "send", "replay", "wait"]


def test_a_layer_is_ten_launches(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32)
    [captured] = target.forwards._captured  # type: ignore[attr-defined]
    forward = captured.graph
    assert isinstance(forward, CheckedGraph)
    num_layers = target.cache_shape.num_layers
    assert len(forward.launches) == num_layers * LAUNCHES_PER_LAYER + 3  # embedding, last norm, head


def test_costs_are_timed_over_a_whole_slot(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cuda_target(files, torch.float32, 1, 300)
    monkeypatch.setattr(step_costs, "seconds_of", lambda _, forward: 0.001 * len(forward.args[0][0]))
    assert step_costs.measure_step_costs(target).lengths == (64, 256)
    assert target.forwards.arena is not None
    assert len(target.forwards.arena.leases.free) == target.num_slots == 1


@pytest.mark.parametrize("engine_name", list(ENGINES))
def test_drafts_are_planned_for_beside_the_slots(files: ModelFiles, engine_name: str) -> None:
    """A drafter's memory per sequence fits the GPU plan's reserve."""
    target, sizes = TargetModel.load(files, "float32", "cpu"), read_sizes(files, "float32")
    assert sizes is not None
    planned = drafts_of(engine_entry(engine_name).slots(3000), sizes, GPU).slot_bytes
    drafter = create_drafter(engine_name, target, free_rows)
    drafter.start(Sequence("a", [1], SamplingParams(max_tokens=2999), target.vocab_size), target.new_cache(3000))
    drafting = getattr(getattr(drafter, "_counted", None), "drafter", drafter)
    partial = [each.partial for each in getattr(drafting, "_tracked", {}).values() if hasattr(each, "partial")]
    held = sum(cache._buffer.numel() * cache._buffer.element_size() for cache in partial)
    assert held <= planned
    assert bool(held) == bool(planned)


@pytest.mark.parametrize("engine_name", ["tokenswift", "triforce"])
def test_a_drafter_s_slots_take_what_was_planned_for_them(
    files: ModelFiles, engine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts partial caches, draft model and heads, to the byte except small tables."""
    target = cuda_target(files, torch.float32, 2, 3000)
    sizes, wanted = read_sizes(files, "float32"), slots_wanted(engine_name, files, "float32", 3000, None)
    assert sizes is not None
    planned = drafts_of(wanted, sizes, GPU)
    drafter = create_drafter(engine_name, target, free_rows).ways["tree"].drafter  # type: ignore[attr-defined]
    arena = drafter._new_entries.__self__  # type: ignore[attr-defined]
    slot_bytes = (arena.buffer.nbytes + arena.means.nbytes) // 2
    part_bytes = arena.means.nbytes // 4  # one slot's mean keys while chunks are scored
    rounds = target.forwards._rounds[arena]  # type: ignore[attr-defined]
    sums = rounds._captured.decoder.attention.scratch
    part_bytes += sums.output.nbytes + sums.lse.nbytes
    if engine_name == "triforce":
        model = drafter._proposer._draft_model._model.forwards  # type: ignore[attr-defined]
        draft_slot = model.arena.buffer.nbytes // 3
        slot_bytes += draft_slot
        weights = {each.data_ptr(): each.nbytes for each in buffers_of(model._weights)}
        buffers = [each.untyped_storage() for each in buffers_of(model._decoder) if each.dtype == torch.float32]
        work = {each.data_ptr(): each.nbytes() for each in buffers}
        assert "_batch_sampler" not in vars(model)  # it has the target's
        outside = {model.arena.buffer.data_ptr(), *weights}
        part_bytes += draft_slot + sum(weights.values())
        part_bytes += sum(size for place, size in work.items() if place not in outside)
    else:
        heads = drafter._proposer._heads  # type: ignore[attr-defined]
        part_bytes += heads._weight.nbytes + heads._graph._logits.nbytes
    assert slot_bytes == planned.slot_bytes
    of_a_split = sums.output[0].nbytes + sums.lse[0].nbytes  # a cache's means count as entries, too
    assert planned.part_bytes - part_bytes in (0, of_a_split)


def buffers_of(thing: object) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, (list, tuple)):
        return [each for part in thing for each in buffers_of(part)]
    if getattr(type(thing), "__module__", "").startswith("swiftbatch.worker.kernels"):
        return [each for part in vars(thing).values() for each in buffers_of(part)]
    return []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine_name", list(ENGINES))
def test_every_engine_gives_the_reference_s_tokens_for_200_tokens(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch, engine_name: str
) -> None:
    """Trees are small, because a row takes the interpreter a quarter of a second."""
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MAX_TREE_NODES", 3)
    reference = TargetModel.load(embedded_files, "float32", "cpu")
    expected = generated(reference, "autoregressive", 200, LONG[:1])
    target = cuda_target(embedded_files, torch.float32, 1, 300, "cublas")
    assert generated(target, engine_name, 200, LONG[:1], costs=dear_rows) == expected


def dear_rows() -> StepCosts:
    return StepCosts((64, 8192), np.array([[1 + num_rows / 4 for num_rows in ROW_COUNTS]] * 2))


def test_a_forward_is_behind_all_that_was_computed_on_other_streams(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[ComputingStream] = []
    target = cuda_target(files, torch.float32, 1, linear="cublas")
    monkeypatch.setattr(ComputingStream, "join", lambda stream: joined.append(stream))
    target.verify([tree_rows(target.new_cache(10), 5, DraftTree())])
    assert joined == [computing_stream(target.device)]


def test_auto_scans_no_text_on_a_gpu(files: ModelFiles) -> None:
    on_gpu, on_cpu = cuda_target(files, torch.float32, 1, 3000), TargetModel.load(files, "float32", "cpu")
    drafters = [create_drafter("auto", target, free_rows) for target in (on_gpu, on_cpu)]
    assert ["chain" in drafter.ways for drafter in drafters] == [False, True]  # type: ignore[attr-defined]


def test_a_model_is_checked_in_the_arena_s_only_slot(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, num_slots=1, linear="cublas")
    check_model(target)
    assert target.forwards.arena is not None
    assert len(target.forwards.arena.leases.free) == 1


@pytest.mark.parametrize(("longest_job", "lengths"), [(1, (0,)), pytest.param(200, (64, 192), marks=pytest.mark.slow)])
def test_costs_are_measured_in_a_slot_however_short_before_jobs_take_all(
    files: ModelFiles, longest_job: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are measured for the fewest and the most rows."""
    monkeypatch.setattr(step_costs, "ROW_COUNTS", (ROW_COUNTS[0], ROW_COUNTS[-1]))
    monkeypatch.setattr(step_costs, "PROBE_REPEATS", 1)
    monkeypatch.setattr(step_costs, "FEWEST_REPEATS", 1)
    long_model = cuda_target(replace(files, max_positions=20_000), torch.float32, 1, longest_job, "cublas")
    costs = step_costs_of(long_model)
    taken = long_model.new_cache(longest_job)  # noqa: F841
    assert costs().lengths == lengths
