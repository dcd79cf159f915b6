"""Rows meet their own LoRA adapter alone, with the bits and tokens that they have without company."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.variants import BENCH_ENGINES, COMPARED
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.exactness.forward_comparisons import probe_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.native_library import runnable_variants
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.engine.prefix_parts import decode, new_engine, rows_of, sequence, text, to_the_end
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.lora_parts import located, write_adapter

pytestmark = needs_kernels

NAMES = (None, "all", "few")
TREE = DraftTree([5, 9, 2, 7, 7, 3], [-1, 0, 0, 2, -1, 4])


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of all linear layers, and one of some with another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    few = write_adapter(folder / "few", tiny_model, 2, ("q_proj", "down_proj"), rank=24)
    return {"all": write_adapter(folder / "all", tiny_model), "few": few}


@pytest.fixture(scope="module")
def loaded(tiny_model: Path, adapters: dict[str, Path]) -> Callable[..., TargetModel]:
    @functools.cache
    def load(dtype: str = "float32", kv_dtype: KVDtype | None = None) -> TargetModel:
        files = locate_model(str(tiny_model))
        return TargetModel.load(files, dtype, "cpu", kv_dtype=kv_dtype, loras=located(**adapters))

    return load


def named(target: TargetModel, lora: str | None, number: int = 0) -> Sequence:
    made = sequence(target, f"{lora}{number}", text(number, 40, target.vocab_size), 24)
    made.lora = lora
    return made


def logits(target: TargetModel, names: tuple[str | None, ...]) -> list[torch.Tensor]:
    """Return the logits of a tree's rows behind a text, for each adapter, in one forward."""
    prompt, caches = text(1, 70, target.vocab_size), [target.new_cache(200, lora=name) for name in names]
    for cache in caches:
        target.read(cache, prompt)
    found = target.verify([tree_rows(cache, 4, TREE) for cache in caches])
    return [each.logits.clone() for each in found]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", [pytest.param(None, id="own"), *runnable_variants()])
def test_rows_of_two_adapters_and_of_none_have_the_bits_that_they_have_alone(
    variant: str | None,
    dtype: str,
    kv_dtype: KVDtype | None,
    loaded: Callable[..., TargetModel],
    tiny_model: Path,
    adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = loaded(dtype, kv_dtype)
    if variant is not None:
        monkeypatch.setenv("SWIFTBATCH_ISA", variant)
        files = locate_model(str(tiny_model))
        target = TargetModel.load(files, dtype, "cpu", kv_dtype=kv_dtype, loras=located(**adapters))
    alone = {name: logits(target, (name,))[0] for name in NAMES}
    assert not alone["all"].equal(alone["few"])
    assert not alone["all"].equal(alone[None])
    names = ("few", None, "all", "all", None, "few")
    for name, found in zip(names, logits(target, names), strict=True):
        assert found.equal(alone[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_without_an_adapter_have_the_bits_of_a_model_without_any(
    dtype: str, loaded: Callable[..., TargetModel], tiny_model: Path
) -> None:
    plain = TargetModel.load(locate_model(str(tiny_model)), dtype, "cpu")
    assert logits(loaded(dtype), (None, "all"))[0].equal(logits(plain, (None,))[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_random_tree_rows_with_an_adapter_none_differs_in_any_bit(
    dtype: str, loaded: Callable[..., TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = loaded(dtype)
    monkeypatch.setattr(target, "new_cache", functools.partial(target.new_cache, lora="all"))
    assert probe_rows(target, num_rows=300, seed=4).num_differing == 0


@pytest.fixture(scope="module")
def plain(loaded: Callable[..., TargetModel]) -> list[list[int]]:
    """The tokens of plain decoding, one sequence at a time; all differ."""
    target = loaded()
    found = [decode(new_engine(target), [named(target, name)])[0].sequence.output_ids.tolist() for name in NAMES]
    assert len({*map(tuple, found)}) == len(NAMES)
    return found


@pytest.mark.parametrize(
    "engine_name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPARED)) for name in BENCH_ENGINES]
)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(
    engine_name: str, loaded: Callable[..., TargetModel], plain: list[list[int]]
) -> None:
    target = loaded()
    batch = [named(target, name) for name in NAMES]
    batch[1].extend(plain[1][:9])
    decode(new_engine(target, engine_name), batch)
    assert [each.output_ids.tolist() for each in batch] == plain


def test_a_prompt_is_shared_among_the_jobs_of_one_adapter_alone(loaded: Callable[..., TargetModel]) -> None:
    target, prompt = loaded(), text(5, 200, loaded().vocab_size)

    def asking(name: str | None, number: int) -> Sequence:
        made = sequence(target, f"{number}", prompt)
        made.lora = name
        return made

    alone = {name: decode(new_engine(target), [asking(name, 0)])[0] for name in NAMES}
    assert len({rows_of(slot) for slot in alone.values()}) == len(NAMES)
    engine = new_engine(target)
    together = [engine.start(asking(name, number), None, 200) for number, name in enumerate((*NAMES, *NAMES))]
    to_the_end(engine, [slot.sequence for slot in together])
    for slot, name in zip(together, (*NAMES, *NAMES), strict=True):
        assert rows_of(slot) == rows_of(alone[name])
    assert engine.counters.num_copied_tokens == len(NAMES) * 199
    for slot in together:
        engine.stop(slot.sequence)
    for number, name in enumerate(NAMES):  # from what is kept of ended jobs
        [later] = decode(engine, [asking(name, 9 + number)], 200)
        assert rows_of(later) == rows_of(alone[name])
    assert engine.counters.num_copied_tokens == 2 * len(NAMES) * 199
