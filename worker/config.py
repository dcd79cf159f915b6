"""What a worker needs to know to decode. Needs no torch: the driver makes it, the workers read it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from worker.drafters.names import DEFAULT_ENGINE


class EngineConfig(BaseModel):
    """Model, numerics and engine of one worker; the same for all workers of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "embedded"
    engine: str = DEFAULT_ENGINE
    draft_model: str | None = None  # folder with the engine's trained parts; None: they lie beside the model's weights
    kv_offload: str | None = None  # folder that key-value caches are kept in; None: on the device
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int = Field(default=1, ge=1)
    num_slots: int = Field(default=1, ge=1)
    checkpoint: Literal["tokens", "state"] = "state"  # what is written: token logs alone, or the caches as well
    checkpoint_tokens: int = Field(default=1024, ge=1)  # of one job, between two states
    checkpoint_seconds: float = Field(default=5.0, gt=0)  # between two token logs
    grace_seconds: float = Field(default=20.0, ge=0)  # to write checkpoints in, after SIGTERM
    store_retry_seconds: float = Field(default=120.0, ge=0)  # for which a failing store is tried again
