"""What waits for a CUDA device: the engine runs there, and the probe says what its rows are worth."""

from __future__ import annotations

import pytest
import torch

from jobs.sampling import SamplingParams
from tests.worker.drafters.drafter_parts import free_rows
from worker.bench.variants import BENCH_ENGINES, create_bench_drafter
from worker.config import Computation
from worker.engine import Engine
from worker.exactness.doctor import diagnose
from worker.model.files import ModelFiles
from worker.model.text import TextCodec
from worker.sequence import Sequence
from worker.target.target import TargetModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_every_engine_decodes_on_cuda_as_plain_decoding_does(embedded_files: ModelFiles, engine_name: str) -> None:
    target = TargetModel.load(embedded_files, "float32", "cuda")
    outputs = []
    for name in ("autoregressive", engine_name):
        params = SamplingParams(max_tokens=200, seed=5, min_p=0.1, ignore_eos=True)
        prompt_ids = TextCodec(embedded_files).encode("The coach left at dawn, and")
        sequence = Sequence("s", prompt_ids, params, target.vocab_size, target.device)
        engine = Engine(target, create_bench_drafter(name, target, free_rows))
        engine.start(sequence)
        while sequence.finish_reason is None:
            engine.step()
        outputs.append(sequence.output_ids.tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_doctor_gives_a_verdict_on_cuda(dtype: str) -> None:
    diagnosis = diagnose(Computation(dtype=dtype, device="cuda"))
    assert diagnosis.device == "cuda"
    assert diagnosis.num_rows >= 2000
