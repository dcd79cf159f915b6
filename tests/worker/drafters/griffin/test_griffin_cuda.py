"""GRIFFIN's rows in CUDA kernels equal torch's."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch

import tests.worker.interpreter  # noqa: F401
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.engine_options import GriffinOptions
from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.cuda_griffin import cuda_rows
from swiftbatch.worker.drafters.griffin.draft_forwards import TiledRows, rows_of
from swiftbatch.worker.drafters.griffin.draft_input import SPREAD, Candidates, DraftRows, features_of
from swiftbatch.worker.drafters.griffin.griffin_model import (
    SECOND_FUSIONS,
    GriffinConfig,
    GriffinModel,
    _stacked_numbers,
    load_griffin,
)
from swiftbatch.worker.forward.cuda.cuda_loading import drafts_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import pack_tiles
from swiftbatch.worker.kernels.cuda.cuda_graph import Download, Upload
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, SlotsWanted
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import GRIFFIN_FILE, PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.sampler import TokenSampler
from tests.tiny_targets import numbers_as_a_gpu_has_them as numbers_as_a_gpu_has_them
from tests.worker.drafters.griffin.griffin_parts import GREEDY, noisy_draft_model, random_rows, regressed
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

NUM_CANDIDATES = 5
NUM_SLOTS = 3
DIFFERING = ("token", "none")  # a second fusion, and none; test_griffin_rows.py tries the fused sources
VARIANTS = [
    *(pytest.param(name, 128, True, marks=() if name in DIFFERING else pytest.mark.slow) for name in SECOND_FUSIONS),
    ("token", 0, False),
]
DRAWN = SamplingParams(
    max_tokens=600,
    temperature=0.8,
    seed=3,
    min_p=0.02,
    repetition_penalty=1.3,
    penalty_window=40,
    ignore_eos=True,
    frequency_penalty=0.5,
    presence_penalty=0.2,
    logit_bias={"5": 2.0, "11": -3.0},  # type: ignore[arg-type]
    min_tokens=600,
    stop_token_ids=(7, 8, 9),
)


@pytest.fixture(scope="module")
def target(one_layer_model: Path) -> TargetModel:
    return cuda_target(locate_model(str(one_layer_model)), torch.float32, NUM_SLOTS)


@pytest.fixture(scope="module")
def config(target: TargetModel) -> GriffinConfig:
    sizes = target.forwards.sizes  # type: ignore[attr-defined]
    return GriffinConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        expansion_size=sizes.intermediate,
    )


def nan_rows(model: GriffinModel, target: TargetModel) -> CudaRows:
    rows = cuda_rows(model, target.forwards, NUM_CANDIDATES)
    for buffer in (rows._arena.buffer, rows._features):
        buffer.fill_(float("nan"))
    return rows


def bytes_held(something: object, known: set[int]) -> int:
    """Count device tensors that an object leads to."""
    if id(something) in known or isinstance(something, FunctionType):
        return 0
    known.add(id(something))
    if isinstance(something, torch.Tensor):
        storage = something.untyped_storage()
        is_new = storage.data_ptr() not in known
        known.add(storage.data_ptr())
        return storage.nbytes() * is_new
    fields = vars(something) if hasattr(something, "__dict__") else {}
    parts = [part for name, part in fields.items() if name not in ("_hosts", "_host", "launches")]
    parts += something if isinstance(something, list | tuple) else []
    return sum(bytes_held(part, known) for part in parts)


def guessed_logits(rows: TiledRows, part: DraftRows, target: TargetModel) -> torch.Tensor:
    """Return torch's logits after a tree's rows, `[num_rows, vocab]`."""
    [tile] = pack_tiles([part.rows], pad_rows=True)
    return target.logits(rows._tile(tile, features_of([part]))[0])[: len(part)]


def is_near(found: list[Candidates], expected: list[Candidates]) -> bool:
    ours, theirs = ([pair for row in rows for pair in row] for rows in (found, expected))
    tokens, expected_tokens = ([token for _, token in pairs] for pairs in (ours, theirs))
    scores, expected_scores = ([score for score, _ in pairs] for pairs in (ours, theirs))
    return tokens == expected_tokens and np.allclose(scores, expected_scores, rtol=1e-4, atol=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("fusion", "expansion_size", "has_head"), VARIANTS)
def test_kernels_and_torch_say_the_same_of_every_variant(
    target: TargetModel, config: GriffinConfig, fusion: str, expansion_size: int, has_head: bool
) -> None:
    config = replace(config, fusion=fusion, expansion_size=expansion_size, has_token_enhanced_head=has_head)
    check_kernels_say_what_torch_says(target, config)


def test_kernels_and_torch_say_the_same_of_eagle_s_layer(target: TargetModel, config: GriffinConfig) -> None:
    changes = {"has_input_norm": False, "has_attention_bias": True, "epsilon": 0.5, "rope_theta": 20.0}
    config = replace(config, fusion="none", has_token_enhanced_head=False, **changes)  # type: ignore[arg-type]
    check_kernels_say_what_torch_says(target, config)


def test_torch_runs_griffin_s_published_form_for_a_target_in_slots(target: TargetModel, config: GriffinConfig) -> None:
    config = replace(config, has_token_enhanced_head=False, has_input_norm=False, is_published=True)
    model = noisy_draft_model(target, config)
    rows = rows_of(model, target, NUM_CANDIDATES)
    assert isinstance(rows, TiledRows)
    part = random_rows(random.Random(1), rows, 130, target, most_rows=7)
    [found] = rows.run([part])
    assert len(found) == len(part)


def check_kernels_say_what_torch_says(target: TargetModel, config: GriffinConfig) -> None:
    model = noisy_draft_model(target, config)
    ways = nan_rows(model, target), TiledRows(model, target, NUM_CANDIDATES)
    outputs = []
    for rows in ways:
        parts = [random_rows(random.Random(1), rows, length, target, most_rows=7) for length in (0, 130)]
        outputs.append((rows.run(parts), [regressed(part) for part in parts], parts))
    (ours, features, parts), (theirs, expected, _) = outputs
    assert all(map(is_near, ours, theirs))
    for found, wanted in zip(features, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def expected_ranks(part: DraftRows, logits: torch.Tensor) -> list[Candidates]:
    """Return the best tokens after each path, with penalties and noise."""
    found = []
    for path, row in zip(part.paths, logits, strict=True):
        sequence = part.room.sequence
        sampler = TokenSampler(sequence, sequence.vocab_size)
        for token_id in path:
            sampler.push(token_id)
        scores = sampler.penalised(row)
        floor = scores.max() + sequence.sampling.temperature * math.log(sequence.sampling.min_p)
        noise = sequence.noise.row(len(sequence) + len(path))
        scores = torch.where(scores >= floor, scores + sequence.sampling.temperature * noise, -torch.inf)
        best = torch.topk(torch.log_softmax(scores / SPREAD, dim=-1), NUM_CANDIDATES)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        found.append([pair for pair in pairs if pair[0] > -math.inf])
    return found


def test_candidates_are_ranked_with_the_noise_and_the_penalty_that_their_paths_will_have(
    target: TargetModel, config: GriffinConfig
) -> None:
    model = noisy_draft_model(target, config)
    rows = nan_rows(model, target)
    part = random_rows(random.Random(2), rows, 30, target, DRAWN, most_rows=9)
    [before] = rows.run([part])
    plain = TiledRows(model, target, target.vocab_size)
    logits = guessed_logits(plain, random_rows(random.Random(2), plain, 30, target, most_rows=9), target)
    assert is_near(before, expected_ranks(part, logits))
    part.room.sequence.extend([before[0][0][1]] * 3)  # the device already knows it
    for _ in range(2):
        [after] = rows.run([part])
        assert is_near(after, expected_ranks(part, logits))
    assert not is_near(after, before)


def test_a_row_has_the_same_bits_alone_and_among_other_sequences(target: TargetModel, config: GriffinConfig) -> None:
    rows = nan_rows(noisy_draft_model(target, config), target)
    sizes = ((200, DRAWN), (40, GREEDY))
    parts = [
        random_rows(random.Random(n), rows, length, target, params, most_rows=33)
        for n, (length, params) in enumerate(sizes)
    ]
    graph = rows._graph
    assert isinstance(graph, CheckedGraph)
    together, features = rows.run(parts), [regressed(part) for part in parts]
    assert graph.num_replays == 2  # 66 rows
    for number, part in enumerate(parts):
        assert rows.run([part]) == [together[number]]
        assert torch.equal(regressed(part), features[number])
    assert rows.run([parts[0].part(0, 1)]) == [together[0][:1]]


def test_a_level_is_one_table_up_one_replay_and_one_wait_and_a_look_at_the_text_waits_for_nothing(
    target: TargetModel, config: GriffinConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = nan_rows(noisy_draft_model(target, config), target)
    part = random_rows(random.Random(4), rows, 20, target, most_rows=3)
    done: list[str] = []
    for kind, name in ((Upload, "send"), (CheckedGraph, "replay"), (Download, "wait")):
        call = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, call=call, name=name: [done.append(name), call(self)][1])
    rows.run([part])
    rows.run([replace(part, paths=[])])
    assert done == ["send", "replay", "wait", "send", "replay"]


def test_what_is_held_on_the_device_is_planned_for(target: TargetModel, one_layer_model: Path) -> None:
    files, sizes = target.files, read_sizes(target.files, "float32")
    assert sizes is not None
    needs = ENGINES["griffin"].memory_of(files.path / PARTS_FOLDER / GRIFFIN_FILE, files)
    drafts = drafts_of(SlotsWanted(100, engine=needs), sizes, GPUMemory(10**9))
    rows = rows_of(load_griffin(None, target), target, GriffinOptions().breadth)
    assert isinstance(rows, CudaRows)
    bytes_held(target.forwards.surroundings, known := set[int]())  # type: ignore[attr-defined]
    held = bytes_held(rows, known)
    planned = drafts.part_bytes + NUM_SLOTS * drafts.slot_bytes
    assert 0.9 * planned < held + 4 * _stacked_numbers(load_griffin(None, target).config) <= planned
