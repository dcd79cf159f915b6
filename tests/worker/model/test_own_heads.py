"""Kinds whose layers have heads of their own keep the promises of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kv.kv_capacity import FORGETS_EVERY, NUM_ASKED, NUM_UNWRITTEN, bytes_per_position, held_of
from swiftbatch.worker.model.model_files import locate_model, read_config
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kv.window_parts import spoil_what_is_forgotten
from tests.worker.model.deepseek_v4_parts import SHORT, write_v4
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import logits_of, make_twins
from tests.worker.model.gemma4_configs import GEMMA4, STRIPES, write_gemma4
from tests.worker.model.kind_promises import NUM_RECOVERED, decode, loaded, sequences
from tests.worker.model.mimo_configs import MIMO, MIMO_STRIPES, write_mimo
from tests.worker.model.minimax_config import PUBLISHED, write_m3

pytestmark = [pytest.mark.long, needs_kernels]

ENGINES = ("auto", "token-recycling", "prompt-lookup", "suffix")
LENGTH = 603  # ends within the positions of each kind of pooled keys


@dataclass(frozen=True)
class Kind:
    """A kind's random model, and what a cache takes of it."""

    write: Callable[[Path], object]
    config: dict[str, Any]
    stripes: tuple[int, ...]
    num_numbers: int  # of a stripe, for each position
    num_whole: int = 0  # stripes of layers without a window, if others have one
    most_shifted: float | None = None  # logits by 8-bit keys and values; None: it has none
    first_length: int = 20  # of texts before rows of trees

    @property
    def forms(self) -> list[tuple[str, KVDtype | None]]:
        """Return dtypes of weights, and of keys and values."""
        coded: list[tuple[str, KVDtype | None]] = [("bfloat16", "int8"), ("bfloat16", "fp8")]
        return [("bfloat16", None), *([("float32", None)] if self.most_shifted is None else coded)]


def of_gemma(name: str) -> Kind:
    stripes = STRIPES[name]
    return Kind(functools.partial(write_gemma4, name), GEMMA4[name], stripes, 2 * 64, stripes[1] + stripes[3], 0.5)


KINDS = {name: of_gemma(name) for name in GEMMA4} | {
    "DeepSeek V4": Kind(write_v4, SHORT, (1, 8, 2, 3, 1, 8, 2, 1, 3, 1), 64, 6),
    "MiMo": Kind(write_mimo, MIMO, MIMO_STRIPES, 2 * 96, 2, 1.0),
    "MiniMax M3": Kind(write_m3, PUBLISHED, (2, 2, 3, 3, 3), 2 * 64, first_length=180),
}
TRIED = ("Gemma 4 31B", "Gemma 4 26B A4B", "Gemma 4 E2B", "DeepSeek V4", "MiMo", "MiniMax M3")
CODED = ("Gemma 4 31B", "MiMo")

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @functools.cache
    def written(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        KINDS[name].write(folder)
        return folder

    return written


def coded(folder: Path, dtype: str, kv_dtype: KVDtype | None) -> TargetModel:
    return TargetModel.load(locate_model(str(folder)), dtype, "cpu", kv_dtype=kv_dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), [(name, *form) for name in TRIED for form in KINDS[name].forms])
def test_thousands_of_rows_of_trees_are_exact(
    name: str, dtype: str, kv_dtype: KVDtype | None, folders: Folders
) -> None:
    target, num_rows = coded(folders(name), dtype, kv_dtype), 2000 if kv_dtype is None else 500
    assert probe_rows(target, num_rows=num_rows, seed=4, first_length=KINDS[name].first_length).num_differing == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", CODED)
def test_codes_of_8_bits_shift_logits_little(name: str, kv_dtype: KVDtype, folders: Folders) -> None:
    found, most = compare(coded(folders(name), "bfloat16", kv_dtype)), KINDS[name].most_shifted
    assert found.agrees
    assert found.kept is not None
    assert most is not None
    assert 0 < found.kept.shift < most


@pytest.mark.parametrize("name", TRIED)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(name: str, folders: Folders) -> None:
    target = loaded(folders(name), "bfloat16")
    plain = [decode(target, "autoregressive", [text])[0] for text in sequences(target)]
    for engine in ENGINES:
        fresh, resumed = sequences(target)
        resumed.extend(plain[1][:NUM_RECOVERED])
        assert decode(target, engine, [fresh, resumed]) == plain, engine


@pytest.mark.parametrize("name", KINDS)
def test_what_a_checkpoint_holds_and_what_was_forgotten_gives_the_same_bits(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten numbers are NaN and would spread."""
    spoil_what_is_forgotten(monkeypatch)
    target = loaded(folders(name), "bfloat16")
    token_ids = torch.randint(3, 200, (LENGTH,), generator=torch.Generator().manual_seed(8)).tolist()
    caches = [target.new_cache(700, forgets=forgets) for forgets in (False, True, False, True)]
    for cache in caches[:2]:
        while cache.length < len(token_ids):
            target.read(cache, token_ids[cache.length :])
    kv = caches[0].kv(0, len(token_ids))
    assert kv.nbytes == len(token_ids) * target.cache_shape.bytes_per_position()
    for cache in caches[2:]:
        cache.load(kv)
    tree = DraftTree.chain(token_ids[:30])
    logits = [target.verify([tree_rows(cache, 7, tree)])[0].logits for cache in caches]
    assert all(torch.equal(logits[0], each) for each in logits[1:])
    windows = target.cache_shape.windows or [None] * len(KINDS[name].stripes)
    forgotten = [bool(caches[1].stored(layer)[0][:, 0].isnan().all()) for layer in range(len(windows))]
    assert forgotten == [window is not None for window in windows]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KINDS)
def test_caches_take_what_each_layer_has_and_plans_count_it(name: str, folders: Folders) -> None:
    kind, config, target = KINDS[name], read_config("", folders(name)), loaded(folders(name), "bfloat16")
    shape = target.cache_shape
    assert shape.stripes == kind.stripes
    expected = 2 * kind.num_numbers * sum(kind.stripes)
    assert bytes_per_position(config, "bfloat16") == shape.bytes_per_position() == expected
    assert target.new_cache(100).rows.buffer.nbytes == (100 + 127) * expected
    found, held = inspect_model(str(folders(name))), held_of(config)
    assert (found.refusal, found.bytes_per_position) == (None, expected)
    assert held == shape.held_positions()
    if kind.num_whole:
        assert held is not None
        assert held.num_whole == max(filter(None, shape.windows)) + NUM_ASKED + FORGETS_EVERY + NUM_UNWRITTEN
        assert held.share == kind.num_whole / sum(kind.stripes)
        assert found.bytes_per_old_position == round(held.share * expected)
    assert measure_step_costs(target) is not None


@pytest.mark.parametrize(
    ("name", "example"),
    [
        *((name, "fp8 in blocks of 128") for name in ("MiMo", "MiniMax M3")),
        *((name, "ModelOpt NVFP4") for name in TRIED if name != "DeepSeek V4"),  # it has forms of its own
    ],
)
def test_packed_weights_give_the_bits_of_their_dequantized_twin(
    name: str, example: str, folders: Folders, tmp_path: Path
) -> None:
    """Packed keys of Gemma 4 are values, too."""
    stored, others = load_file(folders(name) / "model.safetensors"), ("model.mtp", "model.embed_vision")
    tensors = {
        part.replace("language_model.", ""): each for part, each in stored.items() if not part.startswith(others)
    }
    packed, dense = make_twins(EXAMPLES[example], tmp_path, KINDS[name].config, tensors)
    found = inspect_model(str(packed))
    assert found.refusal is None
    assert ("NVFP4" in str(found.quantization)) == ("NVFP4" in example)
    ours, theirs = (logits_of(loaded(each, "bfloat16")) for each in (packed, dense))
    assert torch.equal(ours, theirs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRIED)
def test_what_reads_a_part_of_a_cache_is_refused(name: str, folders: Folders, tmp_path: Path) -> None:
    target = loaded(folders(name), "bfloat16")
    assert not target.forwards.can_scan
    costs = measure_step_costs(target)
    for engine in ("griffin", "tokenswift", "triforce"):
        with pytest.raises(ModelError, match=rf"\Aengine {engine}: .* layers with heads of different sizes in it; use"):
            create_drafter(engine, target, costs)
    with pytest.raises(ModelError, match=r"--kv-offload: .* heads of different sizes"):
        loaded(folders(name), "bfloat16", str(tmp_path))
    if KINDS[name].most_shifted is None:
        with pytest.raises(ModelError, match="--kv-dtype int8: caches of"):
            coded(folders(name), "bfloat16", "int8")
