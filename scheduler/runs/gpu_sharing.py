"""The number of GPUs that share a run's model."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from swiftbatch.jobs.run.run_records import RunManifest
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import NumGPUs
from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.forward.nvml import own_gpus
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES
from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, fewest_gpus
from swiftbatch.worker.kv.kv_capacity import NUM_UNWRITTEN, held_in_windows
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_config import kernel_config
from swiftbatch.worker.model.model_files import locate_model, read_config


def gpus_per_worker(manifest: RunManifest, longest_job: int, settings: Settings) -> NumGPUs:
    """Return the requested number of GPUs for a worker, or the fewest that hold the model and the longest job.

    One GPU where several cannot share the run or are too few: workers then say what is missing. A cluster's GPUs count
    as H100s. Raises ModelError.
    """
    if settings.num_gpus_per_worker is not None:
        return settings.num_gpus_per_worker
    if not _may_share(manifest, longest_job):
        return 1
    files = locate_model(manifest.stored_model, is_whole=settings.address is None)
    decoder, sizes = kernel_config(read_config(files.name, files.path)), read_sizes(files, manifest.dtype)
    if decoder is None or sizes is None:
        return 1
    gpus = own_gpus() if settings.address is None else ()
    free_bytes = min((each.free_bytes for each in gpus), default=GPU_BYTES) - CONTEXT_BYTES
    choices = [number for number in RANK_CHOICES if not gpus or number <= len(gpus)]
    sizes = replace(sizes, kv_dtype=manifest.kv_dtype, held=held_in_windows(sizes.windows, NUM_UNWRITTEN))
    fewest = fewest_gpus(sizes, decoder, GPUMemory(max(0, free_bytes)), longest_job, choices)
    return cast(NumGPUs, fewest or 1)


def _may_share(manifest: RunManifest, longest_job: int) -> bool:
    engine = engine_entry(manifest.engine, manifest.engine_options)
    has_own_kernels = engine.part is not None or engine.slots(longest_job).partial_budget
    in_triton = manifest.linear == "triton" and manifest.attention == "triton"
    return manifest.device == "cuda" and in_triton and not manifest.lora and not has_own_kernels
