"""Every engine gives plain decoding's tokens with every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.variants import BENCH_ENGINES, COMPARED, create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.exactness.forward_comparisons import probe_rows
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.model.kind_parts import tiny_config, tiny_model
from tests.worker.model.kind_sizes import VOCAB_SIZE

pytestmark = pytest.mark.long

Kind = tuple[str, int, bool]
KINDS: list[Kind] = [("mistral", 40, True), ("gemma2", 60, True), ("gpt_oss", 40, True)]
WINDOWED = [  # windows that forget before the text ends; heads that the kernels take, or not
    pytest.param(("mistral", 40, False), marks=pytest.mark.slow),
    *KINDS,
]
SEVERAL_WAYS = ("auto", "tokenswift", "griffin")  # engines that ask a forward for different things
NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_RECOVERED = 50, 24, 13


def name_of(kind: Kind) -> str:
    return f"{kind[0]}{'-wide' * kind[2]}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], TargetModel]:
    """Makes each kind's tiny model with all parts once."""
    return functools.cache(lambda kind: model_with_parts(kind, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=WINDOWED, ids=name_of)
def target(request: pytest.FixtureRequest, made: Callable[[Kind], TargetModel]) -> TargetModel:
    return made(request.param)


def model_with_parts(kind: Kind, folder: Path) -> TargetModel:
    config = tiny_config(*kind)
    tiny_model(config).save_pretrained(folder)
    tiny_model(tiny_config("llama")).save_pretrained(folder / PARTS_FOLDER / DRAFT_FOLDER)
    fingerprint = locate_model(str(folder)).fingerprint
    save_heads(folder / PARTS_FOLDER, 0.02 * torch.randn(3, config.hidden_size, config.hidden_size), fingerprint)
    save_griffin(folder / PARTS_FOLDER, GriffinModel(GriffinConfig.for_target(config)), fingerprint)
    return TargetModel.load(locate_model(str(folder)), "float32", "cpu")


def sequences(target: TargetModel) -> list[Sequence]:
    params = SamplingParams(max_tokens=NUM_TOKENS, min_p=0.02, repetition_penalty=1.1, seed=3, ignore_eos=True)
    texts = torch.randint(3, VOCAB_SIZE, (2, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(5))
    return [Sequence(f"s{i}", text.tolist(), params, target.vocab_size) for i, text in enumerate(texts)]


def decode(target: TargetModel, engine_name: str, batch: list[Sequence]) -> list[list[int]]:
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    for sequence in batch:
        engine.start(sequence)
    while any(sequence.finish_reason is None for sequence in batch):
        engine.step()
    return [sequence.output_ids.tolist() for sequence in batch]


@pytest.fixture(scope="module")
def plain(made: Callable[[Kind], TargetModel]) -> Callable[[Kind], list[list[int]]]:
    return functools.cache(
        lambda kind: [decode(made(kind), "autoregressive", [sequence])[0] for sequence in sequences(made(kind))]
    )


def marks_of(kind: Kind, engine_name: str) -> list[pytest.MarkDecorator]:
    """Run every engine on the last kind, some on all."""
    is_tried = engine_name in SEVERAL_WAYS or (kind == KINDS[-1] and engine_name not in COMPARED)
    return [] if is_tried else [pytest.mark.slow]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "engine_name"),
    [
        pytest.param(kind, name, marks=marks_of(kind, name), id=f"{name_of(kind)}-{name}")
        for kind in KINDS
        for name in BENCH_ENGINES
    ],
)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(
    made: Callable[[Kind], TargetModel], plain: Callable[[Kind], list[list[int]]], kind: Kind, engine_name: str
) -> None:
    expected, (fresh, resumed) = plain(kind), sequences(made(kind))
    resumed.extend(expected[1][:NUM_RECOVERED])
    assert decode(made(kind), engine_name, [fresh, resumed]) == expected


def test_no_chain_is_drawn_with_scanned_keys_of_layers_that_do_not_see_them(target: TargetModel) -> None:
    assert not target.forwards.can_scan


@pytest.mark.sample(3)
@pytest.mark.parametrize("most_rows", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_rows_of_trees_past_a_window_s_edge_are_exact(target: TargetModel, most_rows: int) -> None:
    num_rows = most_rows if isinstance(target.forwards, NativeForwards) else 60
    assert probe_rows(target, num_rows=num_rows, seed=4, first_length=20).num_differing == 0
