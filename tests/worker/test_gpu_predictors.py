"""An MTP layer drafts as on a CPU.

Triton's interpreter runs the same in `tests/worker/drafters/mtp/test_mtp_cuda.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter, slots_wanted
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.cuda.cuda_graph import CudaGraph
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.mtp.mtp_parts import CHECKPOINTS, forwards_of, loaded, publish_with_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets; run with TRITON_INTERPRET=0"),
]

TEXT = [(7 * number * number + 3 * number) % 60 for number in range(150)]
MOST_TOKENS = 160  # some turns of `auto`


def on_cuda(folder: Path, dtype: str) -> TargetModel:
    files = locate_model(str(folder))
    slots = slots_wanted("auto", files, dtype, len(TEXT) + MOST_TOKENS, None)
    target = TargetModel.load(files, dtype, "cuda", slots=slots)
    assert isinstance(target.forwards, CudaForwards)
    assert target.forwards.arena.holds_engine
    return target


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_layer_says_on_cuda_what_it_says_on_a_cpu(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    said = []
    for target in (on_cuda(tmp_path, "float32"), loaded(tmp_path)):
        forwards = forwards_of(target)
        if target.device.type == "cuda":
            assert isinstance(forwards._rows, CudaRows)
            assert isinstance(forwards._rows._graph, CudaGraph)
        sampling = SamplingParams(max_tokens=9, temperature=0.0)
        sequence = Sequence("a", TEXT, sampling, target.vocab_size, target.device)
        forwards.start(sequence, target.new_cache(200))
        hidden = torch.randn(len(TEXT) - 1, target.hidden_size, generator=torch.Generator().manual_seed(1))
        forwards.take("a", 0, hidden.to(target.device, target.dtype))
        said.append(forwards.follow([sequence])[0])
    ours, theirs = said
    assert [token for _, token in ours] == [token for _, token in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-2)


def generated(target: TargetModel, engine_name: str, temperature: float) -> list[list[int]]:
    engine = Engine(target, create_drafter(engine_name, target, free_rows))
    if isinstance(engine.drafter, ChoosingDrafter):
        assert "mtp" in engine.drafter.ways
    sampling = SamplingParams(max_tokens=MOST_TOKENS, temperature=temperature, seed=4, ignore_eos=True)
    sequences = [
        Sequence(f"{number}", TEXT[: 20 + 40 * number], sampling, target.vocab_size, target.device)
        for number in range(3)
    ]
    for sequence in sequences:
        engine.start(sequence)
        engine.step()
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    for sequence in sequences:
        assert sequence.error is None
        engine.stop(sequence)
    return [sequence.output_ids.tolist() for sequence in sequences]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_of_the_layer_change_no_token_on_cuda(name: str, dtype: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = on_cuda(tmp_path, dtype)
    for temperature in (0.0, 1.0):
        plain = generated(target, "autoregressive", temperature)
        assert generated(target, "mtp", temperature) == plain
        assert generated(target, "auto", temperature) == plain
