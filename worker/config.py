"""The settings that a worker decodes by, each default once. Light: the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftbatch.jobs.checkpoints.checkpoint_writer import CHECKPOINT_SECONDS, CHECKPOINT_TOKENS, GRACE_SECONDS
from swiftbatch.jobs.repetition_detection import LoopAction
from swiftbatch.jobs.run.compute_options import (
    AttentionName,
    Device,
    Dtype,
    KVDtype,
    LinearName,
    LogprobsMode,
    NumRows,
    ThinkingMarkers,
)
from swiftbatch.jobs.sampling_params import ThinkingEnd
from swiftbatch.jobs.storage.retries import STORE_RETRY_SECONDS
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels

CheckpointKind = Literal["tokens", "state"]


@dataclass(frozen=True)
class Computation:
    """The settings that decide a run's bytes and its drafts: recorded in `run.json`, the same for all workers."""

    model: str = "embedded"
    engine: str = DEFAULT_ENGINE
    draft_model: str | None = None  # folder with the engine's trained parts; None: the model's own
    kv_offload: str | None = None  # folder that key-value caches are kept in; None: on the device
    dtype: Dtype = "bfloat16"
    kv_dtype: KVDtype | None = None  # of keys and values; None: as `dtype`
    device: Device = "auto"
    attention: AttentionName = CudaKernels.attention
    linear: LinearName = CudaKernels.linear
    num_rows: NumRows = 64  # of every forward on a GPU
    num_threads: int = 1
    seed: int = 0  # the seed of a job that gives none follows from it
    max_tokens: int | None = None  # of a job that gives none; None: what the model's positions leave behind its prompt
    logprobs_mode: LogprobsMode = "raw_logprobs"  # the logits that jobs' log-probabilities are taken from
    loop_guard: LoopAction | None = None  # for a job that says nothing of loops; None: they are not looked for
    thinking_end: ThinkingEnd | None = None  # for a job that says nothing of it; None: a text may end within a thought
    thinking_markers: ThinkingMarkers = None  # texts around a thought; None: the model's own, where they are known
    clock: str | None = None  # the ISO time that chat templates hear as now; None: when the run is made

    @property
    def cuda_kernels(self) -> CudaKernels:
        """The choice on a GPU."""
        return CudaKernels(self.attention, self.linear, self.num_rows)


@dataclass(frozen=True)
class CheckpointSettings:
    """The settings of checkpoints; they may differ from one resume to the next."""

    checkpoint: CheckpointKind = "state"  # what is written: token logs alone, or the caches as well
    checkpoint_tokens: int = CHECKPOINT_TOKENS  # of one job, between two states
    checkpoint_seconds: float = CHECKPOINT_SECONDS  # between two token logs
    grace_seconds: float = GRACE_SECONDS  # to write checkpoints in, after SIGTERM
    keep_state: bool = False  # of jobs that ended at their max_tokens, whose caches then stay
    store_retry_seconds: float = STORE_RETRY_SECONDS  # for which a failing store is tried again


@dataclass(frozen=True)
class EngineConfig(Computation, CheckpointSettings):
    """The settings that a worker is started with."""
