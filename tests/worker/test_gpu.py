"""The engine, and the probe of its rows, on a GPU.

Run `TRITON_INTERPRET=0 python -m pytest -m gpu`; a process has Triton's interpreter or not.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from bench.gpu.everything import STAGES, GPUStage, tried
from bench.gpu.trial import SMALL_SIZES, Trial
from bench.variants import BENCH_ENGINES, create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import bench_slots
from swiftbatch.worker.drafters.catalogue import ENGINES, slots_wanted
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.exactness.doctor import diagnose
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.cuda.cuda_graph import CudaGraph
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.session.recurrent_parts import save_recurrent_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets; run with TRITON_INTERPRET=0"),
]

SMALL_STAGES = ("packed", "kept rows", "draws", "copies", "flash")
PARAMS = SamplingParams(max_tokens=200, seed=5, min_p=0.1, ignore_eos=True)


def wanted(engine_name: str, files: ModelFiles, dtype: str, longest_job: int) -> SlotsWanted:
    """Ask for slots as workers and benchmarks do."""
    if engine_name in ENGINES:
        return slots_wanted(engine_name, files, dtype, longest_job, None)
    return bench_slots([engine_name], longest_job)


def generated(target: TargetModel, engine_name: str, prompt_ids: list[int]) -> list[int]:
    sequence = Sequence("s", prompt_ids, PARAMS, target.vocab_size, target.device)
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    engine.stop(sequence)
    assert sequence.error is None
    return sequence.output_ids.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_every_engine_decodes_on_cuda_as_plain_decoding_does(
    embedded_files: ModelFiles, engine_name: str, dtype: str
) -> None:
    prompt_ids = TextCodec(embedded_files).encode("The coach left at dawn, and")
    slots = wanted(engine_name, embedded_files, dtype, len(prompt_ids) + PARAMS.max_tokens)
    target = TargetModel.load(embedded_files, dtype, "cuda", slots=slots)
    assert isinstance(target.forwards, CudaForwards)
    assert isinstance(target.forwards._captured[-1].graph, CudaGraph)
    plain = generated(target, "autoregressive", prompt_ids)
    assert len(plain) == PARAMS.max_tokens
    assert generated(target, engine_name, prompt_ids) == plain


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_that_forget_what_is_behind_their_windows_give_the_tokens_of_those_that_hold_all(
    tmp_path: Path, dtype: str
) -> None:
    """Pages are 256 positions, so the prompt's first ones are reused before it ends."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    files = locate_model(str(save_recurrent_model(tmp_path, "gemma3_text", **layers)))
    prompt_ids, holding = list(range(3, 250)) * 3, SlotsWanted(950, num_slots=2)
    found = []
    for slots in (holding, replace(holding, num_unwritten=0)):
        target = TargetModel.load(files, dtype, "cuda", slots=slots)
        assert isinstance(target.forwards, CudaForwards)
        assert (target.forwards.arena.windowed is None) == (slots is holding)
        found += [generated(target, engine_name, prompt_ids) for engine_name in ("autoregressive", "token-recycling")]
    assert found == found[:1] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_doctor_gives_a_verdict_on_cuda(dtype: str) -> None:
    diagnosis = diagnose(Computation(dtype=dtype, device="cuda"))
    assert diagnosis.device == "cuda"
    assert diagnosis.num_rows >= 2000


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, id=stage.name) for stage in STAGES if stage.name in SMALL_STAGES]
)
def test_a_stage_of_everything_passes_on_cuda_in_small_sizes(stage: GPUStage, tmp_path: Path) -> None:
    record = tried(stage, Trial(torch.device("cuda"), tmp_path, SMALL_SIZES), tmp_path)
    assert record["state"] == "passed", record


def test_draws_write_into_no_memory_but_their_own() -> None:
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, 4096, device="cuda"))
    gc.collect()
    torch.cuda.empty_cache()  # as every capture does: memory known only by address goes to others
    others = [torch.full((1 << 14,), 7.0, device="cuda") for _ in range(2000)]
    logits = torch.randn(8, 4096, device="cuda")
    found = drawing.top_candidates(logits)[0][:, 0]
    assert found.tolist() == logits.argmax(-1).tolist()
    assert all(bool((other == 7.0).all()) for other in others)
