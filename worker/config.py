"""Settings and defaults of a worker, without heavy imports because the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftbatch.jobs.checkpoints.checkpoint_writer import CHECKPOINT_SECONDS, CHECKPOINT_TOKENS, GRACE_SECONDS
from swiftbatch.jobs.run.run_records import (
    AttentionName,
    Device,
    Dtype,
    KVDtype,
    LinearName,
    LogprobsMode,
    NumRows,
    SamplingDefaults,
    ThinkingMarkers,
)
from swiftbatch.jobs.sampling_params import LoopAction, ThinkingEnd
from swiftbatch.jobs.storage.retries import STORE_RETRY_SECONDS
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels

CheckpointKind = Literal["tokens", "state"]
NumGPUs = Literal[1, 2, 4, 8]  # that share a model


@dataclass(frozen=True)
class Computation:
    """Settings that decide a run's bytes and drafts, recorded in `run.json` for all workers."""

    model: str = "embedded"
    engine: str = DEFAULT_ENGINE
    engine_options: tuple[str, ...] = ()  # NAME=VALUE; they change drafts alone
    draft_model: str | None = None  # a folder with the engine's trained parts; None: the model's own
    kv_offload: str | None = None  # a folder for a CPU's key-value caches; None: in memory
    dtype: Dtype = "bfloat16"
    kv_dtype: KVDtype | None = None  # dtype of keys and values; None: as `dtype`
    lora: tuple[str, ...] = ()  # NAME=PLACE of adapters that lines may name
    device: Device = "auto"
    attention: AttentionName = CudaKernels.attention
    linear: LinearName = CudaKernels.linear
    num_rows: NumRows = 64  # a forward on a GPU has this many
    num_threads: int = 1
    seed: int = 0  # seeds of jobs without one derive from it
    max_tokens: int | None = None  # limit of jobs without their own; None: all positions after the prompt
    logprobs_mode: LogprobsMode = "raw_logprobs"  # jobs' log-probabilities are of these logits
    loop_guard: LoopAction | None = None  # action for jobs without their own; None: no check
    thinking_end: ThinkingEnd | None = None  # action for jobs without their own; None: a text may end within a thought
    sampling_defaults: SamplingDefaults = "model"  # for sampling fields that a line leaves out
    lenient_schemas: bool = False  # leave keywords out that a grammar cannot hold, in place of a reject
    plain_content: bool = False  # keep texts that spell control tokens texts
    thinking_markers: ThinkingMarkers = None  # texts around a thought; None: the model's own, if known
    clock: str | None = None  # the ISO time for chat templates; None: the creation of the run

    @property
    def cuda_kernels(self) -> CudaKernels:
        return CudaKernels(self.attention, self.linear, self.num_rows)


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of checkpoints, which may differ between resumes."""

    checkpoint: CheckpointKind = "state"  # write token logs alone, or caches as well
    checkpoint_tokens: int = CHECKPOINT_TOKENS  # new tokens of a job between two states
    checkpoint_seconds: float = CHECKPOINT_SECONDS  # time between two token logs
    grace_seconds: float = GRACE_SECONDS  # time to write checkpoints after SIGTERM
    keep_state: bool = False  # keep caches of jobs that ended at max_tokens
    store_retry_seconds: float = STORE_RETRY_SECONDS  # a failing store is tried again for so long


@dataclass(frozen=True)
class EngineConfig(Computation, CheckpointSettings):
    """Settings of a worker."""

    num_gpus_per_worker: NumGPUs = 1  # they share each forward; bits are the same on any number
