"""MiniMax M3, whose rows attend to blocks of keys that an indexer chooses, through GPU forwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda import block_kernels
from swiftbatch.worker.kernels.cuda.block_kernels import CudaBlocks
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import BlockChoice
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.decoder_config import kernel_config
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config
from swiftbatch.worker.model.rank_faults import ranks_fault
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.forward.cuda.cuda_parts import CPU, check_attention_plan, cuda_target, packed_and_dense
from tests.worker.kernels.kernel_parts import needs_kernels, path_to, random_tree
from tests.worker.model.formats.examples import fp8
from tests.worker.model.kind_promises import loaded
from tests.worker.model.minimax_config import smaller, write_m3

pytestmark = [pytest.mark.long, needs_kernels]

NUM_BLOCKS = 3
LENGTH = 300  # of texts: rows see two of four blocks in front of their own


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return locate_model(str(write_m3(tmp_path_factory.mktemp("model"), smaller(NUM_BLOCKS))))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts take several steps of each kernel."""
    monkeypatch.setattr(block_kernels, "SPAN", 128)
    monkeypatch.setattr(block_kernels, "READ_AT_ONCE", 4)


def text_of(target: TargetModel, seed: int = 8, length: int = LENGTH) -> list[int]:
    return torch.randint(3, target.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_on_a_cpu(files: ModelFiles, dtype: str, text: list[int]) -> Any:
    """Return the keys and values of a text."""
    target = loaded(files.path, dtype)
    cache = target.new_cache(len(text))
    while cache.length < len(text):
        target.read(cache, text[cache.length :])
    return cache.kv(0, len(text))


def behind_a_text(target: TargetModel, kv: Any, length: int = LENGTH) -> FullKVCache:
    cache = target.new_cache(length + 20)
    cache.load(kv)
    return cache


@pytest.mark.slow
def test_choices_are_those_of_transformers(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, 1, 350, "cublas")
    found = compare(target, 300)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows == 300


@pytest.mark.parametrize(
    ("length", "size"), [(LENGTH, 64), pytest.param(192, 64, marks=pytest.mark.slow), (250, 64), (700, 128)]
)
def test_rows_behind_a_text_are_those_of_the_kernels_in_c(
    length: int, size: int, files: ModelFiles, tmp_path: Path
) -> None:
    """Their caches hold the same keys, values and index keys."""
    if size != 64:
        files = locate_model(str(write_m3(tmp_path, smaller(2, size))))
    ours = cuda_target(files, torch.float32, 1, length + 50, "cublas")
    theirs, tree = loaded(files.path, "float32"), DraftTree([7, 9, 11, 6], [-1, 0, 0, -1])
    text = text_of(ours, length=length)
    kv, logits, kept = read_on_a_cpu(files, "float32", text), [], []
    for target in (ours, theirs):
        cache = behind_a_text(target, kv, length)
        logits.append(target.verify([tree_rows(cache, 5, tree)])[0].logits)
        cache.advance(3)
        kept.append(torch.as_tensor(cache.kv(length, length + 3)).view(torch.float32))
    assert torch.allclose(*logits, atol=2e-3)
    assert torch.equal(logits[0].argmax(1), logits[1].argmax(1))
    assert torch.allclose(*kept, atol=1e-4)


def test_scores_are_largest_products_and_lists_have_the_best_blocks_in_order() -> None:
    """Two rows of a slot, of which the second sees all blocks; of equal scores the lower block is chosen."""
    blocks = CudaBlocks(AttentionShape(2, 2, 64, torch.float32), BlockChoice(128, 3), 1024, CPU)
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, 3, 1024, 64, generator=generator)
    keys[:, :, 256:384] = keys[:, :, 128:256]  # two blocks with equal scores
    blocks.queries.normal_(generator=generator)
    table = TableLayout(1, 1024, 32, 1024, 200).table(torch.zeros(100_000, dtype=torch.int32))
    table.rows[0], table.rows[1] = torch.tensor([0, 704, 5, 0, 0]), torch.tensor([0, 320, 1, 0, 0])
    table.tail_slots[0, :5] = torch.arange(704, 709)
    kept = KeptLayer(keys[:, :2], keys[:, :2])
    blocks.choose(kept, keys[:, 2:], table)
    expected = (blocks.queries[:2] @ keys[0, 2, :640].T).unflatten(1, (5, 128)).amax(2)
    assert torch.allclose(blocks.scores[:2, :5], expected, atol=1e-4)
    listed, own = blocks.chosen(kept, table)
    assert listed.pages is not None
    for head, scores in enumerate(expected.tolist()):
        best = sorted(sorted(range(5), key=lambda block, own=scores: -own[block])[:2])
        pages = [2 * block + part for block in best for part in (0, 1)] + [10]
        assert listed.pages.numbers[head, :5].tolist() == [16 * head + page for page in pages]
        assert own.groups[head].tolist() == [head, head, 1, 320]
        assert own.rows[head, :3].tolist() == [head, 320, 5]
        assert own.tail_slots[head, :5].tolist() == [1024 * head + each for each in range(704, 709)]
    assert listed.pages.numbers[3, :5].tolist() == [16, 17, 18, 19, 20]
    assert own.groups[3].tolist() == [3, 3, 1, 320]
    assert not own.groups[4:, 2:].any()


def test_a_longer_choice_gives_other_logits(files: ModelFiles, tmp_path: Path) -> None:
    """So the test above would notice other choices."""
    other, logits = locate_model(str(write_m3(tmp_path, smaller(4)))), []
    kv = read_on_a_cpu(files, "float32", text_of(loaded(files.path, "float32")))
    for each in (files, other):
        target = cuda_target(each, torch.float32, 1, LENGTH + 50, "cublas")
        logits.append(target.verify([tree_rows(behind_a_text(target, kv), 5, DraftTree())])[0].logits)
    assert not torch.allclose(*logits, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "num_nodes"),
    [("bfloat16", 1), *(pytest.param(dtype, 5, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32"))],
)
def test_rows_of_trees_have_the_bits_of_plain_decoding(dtype: str, num_nodes: int, files: ModelFiles) -> None:
    """A shorter text beside them sees all blocks."""
    target, numbers = cuda_target(files, getattr(torch, dtype), 3, LENGTH + 60), random.Random(4)
    forwards, text = target.forwards, text_of(target)
    assert isinstance(forwards, CudaForwards)
    kv, short = read_on_a_cpu(files, dtype, text), read_on_a_cpu(files, dtype, text[:70])
    caches = [behind_a_text(target, kv), behind_a_text(target, kv), behind_a_text(target, short, 70)]
    trees = [random_tree(numbers, num_nodes, cache.length, 200) for cache in caches]
    _, logits = forwards.run([tree_rows(*each) for each in zip(caches, (5, 6, 7), trees, strict=True)])
    logits, first = logits.clone(), 0
    for cache, root, tree in zip(caches, (5, 6, 7), trees, strict=True):
        length = cache.length
        for node in range(len(tree.parents)):
            for token_id in (root, *(tree.token_ids[each] for each in path_to(tree, node))):
                _, alone = forwards.run([tree_rows(cache, token_id, DraftTree())])
                cache.advance(1)
            assert torch.equal(alone[0], logits[first + 1 + node])
            cache.roll_back(length)
        first += 1 + len(tree.parents)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [128, 256])
def test_rows_have_the_same_bits_in_wider_forwards(num_rows: int, files: ModelFiles) -> None:
    found, kv = [], read_on_a_cpu(files, "bfloat16", text_of(loaded(files.path, "bfloat16")))
    for width in (64, num_rows):
        target = cuda_target(files, torch.bfloat16, 1, LENGTH + 60, num_rows=width)
        tree = DraftTree([7, 9, 11, 6], [-1, 0, 0, -1])
        found.append(target.verify([tree_rows(behind_a_text(target, kv), 5, tree)])[0].logits.clone())
    assert torch.equal(*found)


def test_a_plan_counts_scores_and_lists(files: ModelFiles) -> None:
    target, sizes = cuda_target(files, torch.float32, 1, 250), read_sizes(files, "float32")
    assert sizes is not None
    assert sizes.stripes == (2, 3, 3)
    check_attention_plan(target, "blocks")
    assert target.cache_shape.bytes_per_position() == sizes.bytes_per_position == 4 * 2 * 64 * (2 + 3 + 3)


def test_packed_weights_take_what_the_plan_counts_and_give_their_twin_s_logits(
    files: ModelFiles, tmp_path: Path
) -> None:
    kv = read_on_a_cpu(files, "bfloat16", text_of(loaded(files.path, "bfloat16")))
    logits, tensors = [], load_file(files.path / "model.safetensors")
    for own, stacked in packed_and_dense(fp8([128, 128]), tmp_path, smaller(NUM_BLOCKS), tensors):
        heads = [layer.query_key_value for layer in stacked.layers if layer.index_norms is not None]
        assert [isinstance(each.weight, PackedMatrix) for each in heads if each is not None] == [not logits] * 2
        target = cuda_target(own, torch.bfloat16, 1, LENGTH + 50)
        logits.append(target.verify([tree_rows(behind_a_text(target, kv), 5, DraftTree())])[0].logits.clone())
    assert torch.equal(*logits)


def test_what_gpus_do_not_know_is_refused(files: ModelFiles) -> None:
    config = read_config(files.name, files.path)
    dense = kernel_config(config)
    assert dense is not None
    assert path_on("cuda", config).name == "kernels"
    assert ranks_fault(dense, 2) == "its layers have heads of two forms, or indexers of blocks"
    three = config | {"num_key_value_heads": 3, "index_n_heads": 3, "num_attention_heads": 6}
    assert "found indexers for 3 heads of keys" in str(path_on("cuda", three).reason)
    weights = dense_weights(files, torch.bfloat16)
    assert weights is not None
    target = cuda_target(files, torch.bfloat16, 1)
    arena = target.forwards.arena
    assert arena is not None
    with pytest.raises(ValueError, match="whose choice flash-attn does not take"):
        CudaDecoder(stacked_weights(weights, CPU), arena.on_device, CudaKernels("flash"))
    decoder = target.forwards._decoder  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no part of a cache has"):
        decoder.over(arena.buffer, torch.zeros(1, 1))
