"""An MTP layer in CUDA kernels equals the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.worker.interpreter  # noqa: F401
from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.catalogue import create_drafter, slots_wanted
from swiftbatch.worker.drafters.choice import policy
from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.draft_forwards import Level
from swiftbatch.worker.drafters.griffin.draft_input import Candidates
from swiftbatch.worker.drafters.mtp import predictor
from swiftbatch.worker.drafters.mtp.cuda_predictor import are_alike
from swiftbatch.worker.drafters.mtp.mtp import MTPForwards
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.cuda.cuda_loading import drafts_of, plan_wanted, planned_forwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.cuda.cuda_graph import Download, Upload
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.kv.gpu_memory_plan import SLACK, GPUMemory, SlotsWanted
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import numbers_as_a_gpu_has_them as numbers_as_a_gpu_has_them
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.griffin.test_griffin_cuda import bytes_held, is_near
from tests.worker.drafters.mtp.mtp_parts import CHECKPOINTS, fed, forwards_of, loaded, publish_with_layer
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

TEXT = [(7 * number * number + 3 * number) % 60 for number in range(131)]  # a little more than two blocks
PARAMS = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
PENALISED = PARAMS.model_copy(update={"repetition_penalty": 1.2, "penalty_window": 30})
NUM_SLOTS, NUM_DRAFTED = 2, 3
DENSE, HYBRID = "MiMo", "Qwen3.5"
OFTEN = (DENSE, HYBRID)
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]
Said = tuple[list[Candidates], torch.Tensor]


def on_a_gpu(folder: Path, dtype: torch.dtype = torch.float32, linear: LinearName = "cublas") -> TargetModel:
    target = cuda_target(locate_model(str(folder)), dtype, NUM_SLOTS, linear=linear)
    assert target.forwards.arena is not None
    target.forwards.arena.holds_engine = True
    return target


def rows_of(forwards: MTPForwards) -> CudaRows:
    assert isinstance(forwards._rows, CudaRows)
    return forwards._rows


def nan_forwards(target: TargetModel) -> MTPForwards:
    forwards = forwards_of(target)
    spoil(rows_of(forwards))
    return forwards


def spoil(rows: CudaRows) -> None:
    for buffer in (rows._arena.buffer, rows._features):
        buffer.fill_(float("nan"))


def begun(
    forwards: MTPForwards,
    target: TargetModel,
    name: str,
    length: int,
    chunk: int = 50,
    params: SamplingParams = PARAMS,
) -> Sequence:
    sequence = Sequence(name, TEXT[:length], params, target.vocab_size, target.device)
    forwards.start(sequence, target.new_cache(10))
    hidden = torch.randn(length - 1, target.hidden_size, generator=torch.Generator().manual_seed(length))
    for start in range(0, length - 1, chunk):
        forwards.take(name, start, hidden[start : start + chunk].to(target.dtype))
    return sequence


def drafted(forwards: MTPForwards, sequences: list[Sequence]) -> dict[str, Said]:
    """Return candidates after each sequence and a chain of best tokens, and their features."""
    names = [sequence.sequence_id for sequence in sequences]
    found = {name: [candidates] for name, candidates in zip(names, forwards.follow(sequences), strict=True)}
    trees = {name: DraftTree() for name in names}
    for number in range(NUM_DRAFTED):
        for name, tree in trees.items():
            tree.token_ids.append(found[name][-1][0][1])
            tree.parents.append(number - 1)
        levels = [Level(sequence, trees[sequence.sequence_id], number) for sequence in sequences]
        for name, [candidates] in zip(names, forwards.expand(levels), strict=True):
            found[name].append(candidates)
    rows = range(NUM_DRAFTED + 1)
    return {name: (found[name], torch.stack([fed(forwards, name, row) for row in rows])) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_says_on_a_gpu_what_it_says_on_a_cpu(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    said = []
    for target in (on_a_gpu(tmp_path), loaded(tmp_path)):
        forwards = forwards_of(target) if target.forwards.team else nan_forwards(target)
        said.append(drafted(forwards, [begun(forwards, target, "a", len(TEXT))])["a"])
    (ours, features), (theirs, expected) = said
    assert is_near(ours, theirs)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OFTEN)
def test_drafts_are_the_same_alone_and_in_company(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = on_a_gpu(tmp_path, torch.bfloat16, "triton")
    lengths = {"a": len(TEXT), "b": 71}
    forwards = nan_forwards(target)
    sequences = [begun(forwards, target, each, length, params=PENALISED) for each, length in lengths.items()]
    together = drafted(forwards, sequences)
    for each in sequences:
        forwards.stop(each.sequence_id)
    for each, length in lengths.items():
        spoil(rows_of(forwards))
        candidates, features = drafted(forwards, [begun(forwards, target, each, length, 7, PENALISED)])[each]
        assert candidates == together[each][0]
        assert torch.equal(features, together[each][1])
        forwards.stop(each)


def test_a_full_cache_keeps_the_first_and_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_with_layer(DENSE, tmp_path)
    for constant, number in {"WINDOW": 16, "MOST_AT_ONCE": 16, "NUM_ENTRIES": 96}.items():
        monkeypatch.setattr(predictor, constant, number)
    said = []
    for target in (on_a_gpu(tmp_path), loaded(tmp_path)):
        forwards = forwards_of(target)
        sequence = Sequence("a", TEXT, PARAMS, target.vocab_size, target.device)
        forwards.start(sequence, target.new_cache(10))
        hidden = torch.randn(len(TEXT) - 1, target.hidden_size, generator=torch.Generator().manual_seed(1))
        for start in range(0, len(hidden), 15):
            forwards.take("a", start, hidden[start : start + 15])
            forwards.follow([sequence])
        assert forwards._tracks["a"].num_known < len(hidden)
        said.append(drafted(forwards, [sequence])["a"][0])
    assert is_near(*said)


def generated(target: TargetModel, engine_name: str, sampling: SamplingParams) -> tuple[list[list[int]], Engine]:
    engine = Engine(target, create_drafter(engine_name, target, free_rows))
    sequences = [Sequence(f"{n}", TEXT[: 20 + 9 * n], sampling, target.vocab_size, target.device) for n in range(2)]
    for sequence in sequences:
        engine.start(sequence)
        engine.step()
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    for sequence in sequences:
        assert sequence.error is None
        engine.stop(sequence)
    return [sequence.output_ids.tolist() for sequence in sequences], engine


@pytest.mark.sample(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", OFTEN)
def test_engines_with_the_layer_give_the_tokens_of_plain_decoding(
    name: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "UNMEASURED_GAIN", 100.0)  # few tokens are drawn
    publish_with_layer(name, tmp_path)
    target = on_a_gpu(tmp_path)
    sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=4, ignore_eos=True)
    follow, said = MTPForwards.follow, list[bool]()
    monkeypatch.setattr(MTPForwards, "follow", lambda *given: [found := follow(*given), said.append(any(found))][0])
    plain, _ = generated(target, "autoregressive", sampling)
    for engine_name in ("mtp", "auto"):
        assert generated(target, engine_name, sampling)[0] == plain
        assert any(said), "the layer drafted nothing"
        said.clear()
    assert plain[0] != plain[1]


def let_it_copy(folder: Path) -> None:
    """Let the next token depend only on the last."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.fill_(1e-30)  # a matrix of zeros would be refused
        if name == "mtp.fc.weight":
            tensor.copy_(torch.eye(len(tensor)).repeat(1, 2))
            tensor[:, len(tensor) :] = 0
        if name.startswith("mtp.") and "norm" in name:
            tensor.zero_()  # one more than that
    tensors["mtp.norm.weight"] = tensors[next(name for name in tensors if name.endswith("model.norm.weight"))].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.sample(2)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_drafts_of_a_layer_that_knows_what_comes_are_accepted(temperature: float, tmp_path: Path) -> None:
    publish_with_layer(HYBRID, tmp_path)
    let_it_copy(tmp_path)
    target = on_a_gpu(tmp_path)
    sampling = SamplingParams(max_tokens=5, temperature=temperature, seed=4, ignore_eos=True)
    plain, before = generated(target, "autoregressive", sampling)
    tokens, engine = generated(target, "mtp", sampling)
    assert tokens == plain
    assert len(set(plain[0])) > 2
    assert engine.counters.num_steps <= before.counters.num_steps // 2


def test_a_level_is_one_table_up_one_replay_and_one_wait_and_what_is_read_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_with_layer(DENSE, tmp_path)
    target = on_a_gpu(tmp_path)
    forwards = nan_forwards(target)
    done: list[str] = []
    for kind, name in ((Upload, "send"), (CheckedGraph, "replay"), (Download, "wait")):
        call = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, call=call, name=name: [done.append(name), call(self)][1])
    sequence = begun(forwards, target, "a", 100, 99)
    assert done == ["send", "replay"]  # the first rows; the others wait
    [candidates] = forwards.follow([sequence])
    forwards.expand([Level(sequence, DraftTree.chain([candidates[0][1]]), 0)])
    assert done[2:] == ["send", "replay", "wait"] * 2


@pytest.mark.parametrize("name", OFTEN)
def test_what_is_held_on_the_device_is_planned_for(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = on_a_gpu(tmp_path)
    sizes, wanted = read_sizes(target.files, "float32"), slots_wanted("mtp", target.files, "float32", 100, None)
    assert sizes is not None
    planned = drafts_of(wanted, sizes, GPUMemory(10**9))
    forwards = target.forwards
    held = bytes_held(forwards_of(target)._rows, known={id(forwards.surroundings)})  # type: ignore[attr-defined]
    room = planned.part_bytes + NUM_SLOTS * planned.slot_bytes
    assert 0.9 * room < held <= room


def test_auto_has_the_layer_where_it_has_room(tmp_path: Path) -> None:
    publish_with_layer(HYBRID, tmp_path)
    files = locate_model(str(tmp_path))
    sizes, wanted = read_sizes(files, "float32"), slots_wanted("auto", files, "float32", 100, None)
    assert sizes is not None
    with_layer, without = (drafts_of(each, sizes, GPUMemory(10**9)) for each in (wanted, replace(wanted, engine=None)))
    assert with_layer.part_bytes > without.part_bytes
    assert with_layer.slot_bytes > without.slot_bytes
    memory = plan_wanted(replace(wanted, num_slots=1), sizes, GPUMemory(10**12))
    assert memory.has_engine
    needed = memory.used_bytes - int(SLACK * memory.free_bytes) - with_layer.part_bytes // 2
    least = int(needed / (1 - SLACK))
    tight = plan_wanted(replace(wanted, num_slots=1), sizes, GPUMemory(least))
    assert not tight.has_engine
    assert tight.num_slots == 1
    with pytest.raises(KVRoomError):  # this names the layer
        plan_wanted(replace(wanted, num_slots=1, can_lack_engine=False), sizes, GPUMemory(least))
    for plan, has_room in ((replace(memory, num_pages=9), True), (replace(tight, num_pages=9), False)):
        made = planned_forwards(files, torch.float32, torch.device("cpu"), plan, frozenset(), None)
        assert made is not None
        assert made.arena.holds_engine == has_room
    target = on_a_gpu(tmp_path)
    assert target.forwards.arena is not None
    for holds_engine in (True, False):
        target.forwards.arena.holds_engine = holds_engine
        assert ("mtp" in auto(target, free_rows, None).ways) == holds_engine


def test_a_model_without_such_a_layer_is_planned_as_it_was(tmp_path: Path) -> None:
    publish_with_layer(HYBRID, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wanted = slots_wanted("auto", locate_model(str(tmp_path)), "float32", 100, None)
    assert wanted == SlotsWanted(100)


def test_angles_are_shared_where_both_turn_alike(tmp_path: Path) -> None:
    publish_with_layer(DENSE, tmp_path)
    target = on_a_gpu(tmp_path)
    rotary, turns = target.forwards.surroundings.turns  # type: ignore[attr-defined]
    assert rows_of(forwards_of(target))._model.turns[1] is turns  # type: ignore[attr-defined]
    assert are_alike(rotary, Rotary(rotary.frequencies.copy(), rotary.scaling))
    assert not are_alike(rotary, replace(rotary, frequencies=2 * rotary.frequencies))
