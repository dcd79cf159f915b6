"""A GPU with offloaded caches gives the same bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.variants import BENCH_ENGINES
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.cuda.cuda_forwards import OffloadedForwards
from swiftbatch.worker.forward.target_model import RowOutputs, TargetModel, check_model
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.host_copies import ComputingStream, computing_stream
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target, offloaded_target
from tests.worker.forward.cuda.test_cuda_engine import LAUNCHES_PER_LAYER, LONG, generated
from tests.worker.kernels.kernel_parts import random_tree

pytestmark = pytest.mark.long

NUM_LAYERS = 3  # more than the ring has room for
SIZES = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 32, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
KINDS = [  # bfloat16 uses Triton's products, which take the interpreter half a minute
    (torch.float32, "cublas"),
    pytest.param(torch.bfloat16, "triton", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def files(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = shutil.copytree(one_layer_model, tmp_path_factory.mktemp("deep") / "model")
    config = LlamaConfig.from_pretrained(one_layer_model)
    config.update(SIZES | HEADS)
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return locate_model(str(folder))


def load(cache: FullKVCache, shape: CacheShape, num_positions: int) -> None:
    """Load random keys and values, as from a checkpoint."""
    plain = FullKVCache(shape, num_positions)
    for layer in range(shape.num_layers):
        for rows in plain.stored(layer):
            rows.normal_(generator=torch.Generator().manual_seed(layer))
    plain.advance(num_positions)
    cache.load(plain.kv(0, num_positions))


def read(target: TargetModel, cache: FullKVCache, num_tokens: int) -> list[torch.Tensor]:
    token_ids, hidden = [7 * place % target.vocab_size for place in range(num_tokens)], []
    while token_ids:
        hidden.append(target.read(cache, token_ids))
        token_ids = token_ids[len(hidden[-1]) :]
    return hidden


def step(target: TargetModel, caches: list[FullKVCache], rng: random.Random) -> list[RowOutputs]:
    trees = [random_tree(rng, rng.randrange(3, 6), cache.length, target.vocab_size) for cache in caches]
    outputs = target.verify([tree_rows(cache, 5, tree) for cache, tree in zip(caches, trees, strict=True)])
    for cache, tree in zip(caches, trees, strict=True):
        cache.commit([node for node in range(1, len(tree)) if tree.parents[node] == 0][:1])
    return outputs


def same_bits(ours: list[RowOutputs], theirs: list[RowOutputs]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.hidden.equal(b.hidden) and a.logits.equal(b.logits) for a, b in pairs)


@pytest.mark.parametrize(("dtype", "linear"), KINDS, ids=str)
def test_texts_trees_and_what_is_kept_have_the_bits_of_caches_on_the_device(
    files: ModelFiles, dtype: torch.dtype, linear: str
) -> None:
    targets = [kind(files, dtype, linear=linear) for kind in (offloaded_target, cuda_target)]
    caches = [[target.new_cache(150), target.new_cache(150)] for target in targets]
    for slot, num_loaded in enumerate((124, 20)):
        for target, mine in zip(targets, caches, strict=True):
            load(mine[slot], target.cache_shape, num_loaded)
        ours, theirs = (read(target, mine[slot], 6) for target, mine in zip(targets, caches, strict=True))
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    for number in range(3):
        running = slice(number % 2, None)  # one of them pauses now and then
        outputs = [step(*each, random.Random(number)) for each in zip(targets, [mine[running] for mine in caches])]  # noqa: B905
        assert same_bits(*outputs)
    for ours, theirs in zip(*caches, strict=True):
        assert ours.length == theirs.length > 20
        assert np.array_equal(ours.kv(0, ours.length), theirs.kv(0, theirs.length))


def test_views_of_one_cache_run_side_by_side_with_the_bits_of_caches_on_the_device(files: ModelFiles) -> None:
    found = []
    for kind in (offloaded_target, cuda_target):
        target = kind(files, torch.float32, 1, linear="cublas")
        cache = target.new_cache(150)
        load(cache, target.cache_shape, 100)
        views = [cache.prefix(length) for length in (90, 40)]
        tree = DraftTree([8, 9], [ROOT, ROOT])
        found.append([*target.verify([tree_rows(view, 7, tree) for view in views])])
        views[1].commit([1])
        found[-1] += target.verify([tree_rows(cache, 5, DraftTree())])  # what the views wrote is in its way
    assert same_bits(*found)


def test_a_job_that_comes_back_in_another_slot_goes_on_with_the_same_bits(files: ModelFiles) -> None:
    target = offloaded_target(files, torch.float32, linear="cublas")
    cache, resumed = target.new_cache(150), target.new_cache(150)
    load(cache, target.cache_shape, 60)
    read(target, cache, 8)
    resumed.load(cache.kv(0, 50))
    resumed.load(cache.kv(50, 68))
    assert same_bits(step(target, [cache], random.Random(0)), step(target, [resumed], random.Random(0)))
    assert np.array_equal(cache.kv(0, cache.length), resumed.kv(0, cache.length))


def test_queries_are_those_of_caches_on_the_device(files: ModelFiles) -> None:
    queries = []
    for kind in (offloaded_target, cuda_target):
        target = kind(files, torch.float32, 1, linear="cublas")
        cache = target.new_cache(100)
        load(cache, target.cache_shape, 66)
        with cache.replayed(60) as view:
            queries.append(target.queries(view, 9))
        queries.append(target.verify([tree_rows(cache, 5, DraftTree())])[0].logits)
    assert queries[0].equal(queries[2])
    assert queries[1].equal(queries[3])


def test_an_engine_gives_the_reference_s_tokens(files: ModelFiles) -> None:
    expected = generated(TargetModel.load(files, "float32", "cpu"), "autoregressive", 4, LONG[:1])
    offloaded = offloaded_target(files, torch.float32, linear="cublas")
    assert generated(offloaded, "token-recycling", 4, LONG[:1]) == expected


@pytest.mark.parametrize("kind", [offloaded_target, cuda_target])
def test_a_forward_is_behind_all_that_was_computed_on_other_streams(
    files: ModelFiles, kind: Callable[..., TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[ComputingStream] = []
    target = kind(files, torch.float32, 1, linear="cublas")
    monkeypatch.setattr(ComputingStream, "join", lambda stream: joined.append(stream))
    target.verify([tree_rows(target.new_cache(10), 5, DraftTree())])
    assert joined == [computing_stream(target.device)]


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_every_engine_gives_the_reference_s_tokens(one_layer_model: Path, engine_name: str) -> None:
    tiny = locate_model(str(one_layer_model))
    expected = generated(TargetModel.load(tiny, "float32", "cpu"), "autoregressive", 24, LONG)
    assert generated(offloaded_target(tiny, torch.float32, 3), engine_name, 24, LONG) == expected


def test_a_layer_is_a_graph_of_ten_launches_replayed_once_a_forward(files: ModelFiles) -> None:
    target = offloaded_target(files, torch.float32, 1, linear="cublas")
    forwards = target.forwards
    assert isinstance(forwards, OffloadedForwards)
    graphs = [graph for graph in (forwards._begin, *forwards._layers, forwards._end) if isinstance(graph, CheckedGraph)]
    assert [len(graph.launches) for graph in graphs] == [1, *[LAUNCHES_PER_LAYER] * NUM_LAYERS, 2]
    target.verify([tree_rows(target.new_cache(10), 5, DraftTree())])
    assert [graph.num_replays for graph in graphs] == [1] * (NUM_LAYERS + 2)


def test_a_model_is_checked_and_timed_in_the_only_slot(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    target = offloaded_target(files, torch.float32, 1, linear="cublas")
    check_model(target)
    monkeypatch.setattr(step_costs, "seconds_of", lambda _, forward: 0.001 * len(forward.args[0][0]))
    assert step_costs.measure_step_costs(target).lengths == (64, 192)
    assert target.forwards.arena is not None
    assert len(target.forwards.arena.leases.free) == target.num_slots == 1
