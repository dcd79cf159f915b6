"""A quantized model has its dequantized twin's bits on a run's own path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix, plain
from swiftbatch.worker.model.model_files import locate_model, stored_layout
from swiftbatch.worker.model.weight_files import read_tensors
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.model.formats.examples import EXAMPLES, fp8
from tests.worker.model.formats.twins import LINEARS, TEXT, load, logits_of, make_twins

pytestmark = pytest.mark.long

AS_NUMBERS = {  # formats with some or all matrices unpacked
    "fp8 in blocks that no groups follow",
    "compressed-tensors int4 in the order of activations",
    "compressed-tensors int8 in groups with zeros, scales of float32",
    "GPTQ int4 in the order of activations",
}


@pytest.fixture(scope="module", params=EXAMPLES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    return request.param, *make_twins(EXAMPLES[request.param], tmp_path_factory.mktemp("twins"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_model_has_the_logits_of_its_dequantized_twin_to_the_bit(twins: tuple[str, Path, Path], dtype: str) -> None:
    _, packed, dense = twins
    found, expected = logits_of(load(packed, dtype)), logits_of(load(dense, dtype))
    assert torch.equal(found, expected)
    assert float(found.std()) > 0.1, "logits that say something"


def test_a_matrix_is_the_one_that_its_format_defines_and_stays_packed_where_that_is_exact(
    twins: tuple[str, Path, Path],
) -> None:
    packed, dense = (locate_model(str(folder)) for folder in twins[1:])
    for dtype in (torch.bfloat16, torch.float32):
        found = read_tensors(packed, dtype, lambda weight: weight)
        expected = read_tensors(dense, dtype, lambda weight: weight)
        assert found.keys() == expected.keys()
        for each, weight in found.items():
            assert torch.equal(plain(weight).to(dtype), plain(expected[each]).to(dtype)), each
        matrices = [found[f"model.layers.0.{each}.weight"] for each in LINEARS]
        assert all(isinstance(each, PackedMatrix) for each in matrices) == (twins[0] not in AS_NUMBERS)


def test_heads_tell_the_shapes_that_the_weights_have(twins: tuple[str, Path, Path]) -> None:
    heads = stored_layout("m", twins[1]).heads
    weights = read_tensors(locate_model(str(twins[1])), torch.bfloat16, lambda weight: weight)
    assert {each: head.shape for each, head in heads.items()} == {n: tuple(w.shape) for n, w in weights.items()}


def test_the_engine_auto_draws_the_tokens_of_the_dequantized_twin(tmp_path: Path) -> None:
    drawn = []
    for folder in make_twins(fp8([128, 128]), tmp_path):
        target = load(folder, "bfloat16")
        params = SamplingParams(max_tokens=120, temperature=1.0, min_p=0.02, seed=3, ignore_eos=True)
        sequence = Sequence("a", TEXT, params, target.vocab_size)
        engine = Engine(target, create_drafter("auto", target, free_rows))
        engine.start(sequence)
        while sequence.finish_reason is None:
            engine.step()
        drawn.append(sequence.output_ids.tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 20
