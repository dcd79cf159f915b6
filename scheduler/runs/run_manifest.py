"""The settings of a run that never change: model, engine, numerics, seed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import LoraAdapter
from swiftbatch.jobs.run.job_index import JobIndex
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError, RunManifest
from swiftbatch.jobs.storage.folder_uri import shown_uri
from swiftbatch.scheduler.runs.gpu_sharing import gpus_per_worker
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import PLAIN_ENGINE, engine_entry
from swiftbatch.worker.exactness.doctor_verdicts import known_verdict, verdict_key
from swiftbatch.worker.forward.hardware import cpu_capability, hardware_of, has_cuda, own_gpu
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels, refuse_kv_dtype
from swiftbatch.worker.kernels.native_library import chosen_numerics
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, RunLoad, most_rows, rows_that_pay
from swiftbatch.worker.kv.kv_capacity import NUM_UNWRITTEN, held_in_windows, refuse_offload
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.lora import adapted_linears, locate_loras, with_absolute_places
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config
from swiftbatch.worker.text.tokenizer import TextCodec

DRAFTING = ("engine", "engine_options")
FOLDERS = ("draft_model", "kv_offload")
# the settings that no stored job depends on
CHANGEABLE = ("device", "dtype", "kv_dtype", "attention", "linear", "num_rows", "num_threads")


def kept_or_new_manifest(run_uri: str, settings: Settings) -> RunManifest:
    """Return the run's checked manifest, or a new one.

    Raises RunError if settings differ, unless no job has run and none depends on them.
    """
    try:
        run = Run.open(run_uri, settings.start_retries)
    except RunError:  # absent or unreadable: `Run.planned` tells which
        return _new_manifest(settings)
    said = {name: PLACED[name](value) if name in PLACED else value for name, value in settings.said.items()}
    said |= {} if settings.team is None else {"team": settings.team}
    other = [name for name in said if name not in FOLDERS and said[name] != getattr(run.manifest, name)]
    if not other:
        return run.manifest
    if not set(other) <= {*CHANGEABLE} or run.has_begun():
        raise RunError(_other_setting(other[0], getattr(run.manifest, other[0]), said[other[0]], shown_uri(run_uri)))
    return _changed_manifest(run.manifest, settings)


def _changed_manifest(kept: RunManifest, settings: Settings) -> RunManifest:
    """Return the manifest of a run that has not begun with these settings. Raises ModelError."""
    said = {field.name: getattr(kept, field.name) for field in fields(Computation)} | dict(settings.said)
    if "device" in settings.said and "num_rows" not in settings.said:
        del said["num_rows"]  # another device has its own
    new = _new_manifest(replace(settings, said=said))
    return new.model_copy(update={"run_id": kept.run_id, "created": kept.created, "team": kept.team})


def _other_setting(name: str, kept: Any, found: Any, place: str) -> str:
    if name == "engine":
        return (
            f"--engine {found}: `swiftbatch resume {place} --engine {found}` goes on with it; submit keeps the run's "
            f"engine, {kept}, so leave the option away to add jobs"
        )
    if name == "engine_options":
        return (
            f"--engine-option {' '.join(found)}: `swiftbatch resume {place}` may change it; submit keeps the run's, "
            f"{' '.join(kept) or 'none'}, so leave the option away to add jobs"
        )
    if name == "lora":
        return (
            f"--lora {' '.join(found)}: the run at {place} has {' '.join(kept) or 'no adapters'}; leave the option "
            "away, or use another run folder"
        )
    shown = f"without {name}" if kept is False or kept in (None, ()) else f"with {name} {kept}"
    return f"the run at {place} was made {shown}, found {found}; leave the option away, or use another run folder"


def computation_of(manifest: RunManifest, settings: Settings) -> Computation:
    """Return the run's computation with these settings' engine and folders. Raises KVRoomError."""
    computation = Computation(**{field.name: getattr(manifest, field.name) for field in fields(Computation)})
    said = {name: settings.said[name] for name in (*DRAFTING, *FOLDERS) if name in settings.said}
    if said.get("engine", computation.engine) != computation.engine:  # options belong to their engine
        computation = replace(computation, engine_options=())
    if manifest.device != "cpu":
        refuse_offload(manifest.device, said.get("kv_offload"))
        computation = replace(computation, kv_offload=None)  # earlier versions kept a GPU's caches elsewhere
    return replace(computation, **said)


def with_absolute_folders(computation: Computation) -> Computation:
    folders = {name: folder for name in FOLDERS if (folder := getattr(computation, name))}
    return replace(computation, **{name: os.path.abspath(folder) for name, folder in folders.items()})


def with_model(manifest: RunManifest, files: ModelFiles) -> RunManifest:
    """Add the model's fingerprint and this machine's `swiftbatch doctor` verdict.

    Raises ModelError if its weights cannot be multiplied as the run asks.
    """
    torch_version, kernels = (
        manifest.versions["torch"],
        CudaKernels(manifest.attention, manifest.linear, manifest.num_rows),
    )
    sizes = read_sizes(files, manifest.dtype) if kernels.has_integer_rows else None
    if sizes is not None and not sizes.packed:
        kernels.refuse_integer_rows(f"weights of the model {files.name} are not packed in 8 or 4 bits")
    key = verdict_key(
        files.fingerprint,
        manifest.dtype,
        manifest.device,
        manifest.num_threads,
        hardware_of(manifest.device),
        torch_version,
        chosen_numerics(manifest.device, manifest.dtype, kernels, manifest.kv_dtype),
    )
    return manifest.model_copy(
        update={
            "model_fingerprint": files.fingerprint,
            "text_fingerprint": files.text_fingerprint,
            "model_commit": files.commit,
            "model_files": {**files.digests.model, **files.digests.text},
            "exactness": known_verdict(key),
        }
    )


def with_adapters(manifest: RunManifest, files: ModelFiles) -> tuple[RunManifest, dict[str, LoraAdapter]]:
    """Add the fingerprints of the run's adapters, and return them by name. Raises ModelError for an unfit one."""
    loras = locate_loras(manifest.lora, manifest.lora_commits)
    for each in loras:
        if manifest.lora_files.get(each.name) in (None, each.digests):  # the run refuses others
            adapted_linears(each, read_config(files.name, files.path))
    found = {"lora_files": {each.name: dict(each.digests) for each in loras}}
    commits = {"lora_commits": {each.name: each.commit for each in loras if each.commit is not None}}
    adapters = {each.name: LoraAdapter(name=each.name, fingerprint=each.fingerprint) for each in loras}
    return manifest.model_copy(update=found | commits), adapters


def with_linear(manifest: RunManifest, files: ModelFiles, jobs: JobIndex, settings: Settings) -> RunManifest:
    """Multiply in Triton if several GPUs will share the model: cuBLAS sums a GPU's part in another order."""
    in_triton = manifest.model_copy(update={"linear": "triton"})
    if "linear" in settings.said or gpus_per_worker(in_triton, jobs.longest, settings) == 1:
        return manifest
    return with_model(in_triton, files)


def with_rows(manifest: RunManifest, files: ModelFiles, jobs: JobIndex, settings: Settings) -> RunManifest:
    """Add the number of rows in a GPU's forwards: the requested number, or the fastest one.

    For a cluster, the choice assumes GPUs with 80 GB.
    """
    sizes = None if manifest.device == "cpu" or "num_rows" in settings.said else read_sizes(files, manifest.dtype)
    if sizes is None or not len(jobs):
        return manifest
    here = own_gpu() if settings.address is None else None
    capability, free_bytes = (None, GPU_BYTES) if here is None else (here.capability[0], here.free_bytes)
    held = jobs.columns["num_prompt_tokens"] + jobs.columns["max_tokens"] / 2  # on average, if it ends at its limit
    num_jobs = min(settings.num_slots or len(jobs), -(-len(jobs) // settings.num_workers))
    sizes = sizes.of_a_rank(gpus_per_worker(manifest, jobs.longest, settings))
    if not engine_entry(manifest.engine).reads_caches:
        sizes = replace(sizes, held=held_in_windows(sizes.windows, NUM_UNWRITTEN))
    in_triton = bool(sizes.packed) or manifest.linear == "triton"
    has_narrow = in_triton and manifest.attention != "flash"
    load = RunLoad(num_jobs, float(held.mean()), manifest.engine != PLAIN_ENGINE, has_narrow)
    most = most_rows(capability, sizes.item_size, in_triton)
    gpu = GPUMemory(max(0, free_bytes - CONTEXT_BYTES))
    num_rows = rows_that_pay(sizes, gpu, load, most)
    return with_model(manifest.model_copy(update={"num_rows": num_rows}), files)


def with_markers(manifest: RunManifest, codec: TextCodec) -> RunManifest:
    """Add the thinking markers, if any, and whether the template reads the clock.

    They are kept because another version of swiftbatch may know other markers and split texts differently.
    """
    manifest = manifest.model_copy(update={"reads_clock": codec.chat.reads_clock})
    if manifest.thinking_markers is not None:
        return manifest
    return manifest.model_copy(update={"thinking_markers": () if codec.markers is None else codec.markers.texts})


def refuse_changed_model(run: Run) -> None:
    """Raise RunError if local files of the model or its adapters differ from the run's. Missing files are fine."""
    with contextlib.suppress(ModelError):
        files = locate_model(run.manifest.stored_model, is_whole=False)
        known = {**files.digests.model, **files.digests.text}
        run.refuse_other_model(files.fingerprint, files.text_fingerprint, known, files.commit)
    with contextlib.suppress(ModelError):
        loras = locate_loras(run.manifest.lora, run.manifest.lora_commits)
        run.refuse_other_adapters({each.name: each.digests for each in loras})


def refuse_kernels(kernels: CudaKernels, device: str, dtype: str, address: str | None) -> None:
    """Raise ModelError if the workers would refuse these GPU kernels."""
    if device == "cpu":
        kernels.refuse_unused("the device is a CPU")
        kernels.refuse_rows("the device is a CPU")
    else:
        kernels.refuse_integer_rows("the device is a GPU")
    kernels.refuse_unfit(dtype)
    if address is None:
        kernels.refuse_absent()


def _new_manifest(settings: Settings) -> RunManifest:
    computation = with_absolute_folders(replace(Computation(), **settings.said))
    detected = "auto"
    if settings.address is None and computation.device != "cpu":
        detected = "cuda" if has_cuda() else "cpu"
    shared_cores = max(1, len(os.sched_getaffinity(0)) // settings.num_workers)
    resolved = {
        **{name: place(getattr(computation, name)) for name, place in PLACED.items()},
        "device": detected if computation.device == "auto" else computation.device,
        "num_threads": settings.said.get("num_threads", shared_cores),
        "clock": computation.clock or datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    engine_entry(computation.engine, computation.engine_options)
    refuse_kernels(computation.cuda_kernels, str(resolved["device"]), computation.dtype, settings.address)
    refuse_kv_dtype(computation.kv_dtype, computation.cuda_kernels.attention)
    return RunManifest(
        run_id=f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}",
        created=time.time(),
        model_fingerprint="",
        text_fingerprint="",
        model_files={},
        versions=versions(),
        exactness="not probed",
        cpu_capability=cpu_capability(),
        team=settings.team,
        **asdict(computation) | resolved,
    )


def _place(model: str) -> str:
    return os.path.abspath(model) if model != "embedded" and Path(model).is_dir() else model


PLACED: dict[str, Callable[[Any], Any]] = {"model": _place, "lora": with_absolute_places}
"""Functions that make the places in a setting absolute, by the setting's name."""


def versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("swiftbatch", "torch", "transformers", "ray", "llguidance"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # running from a checkout
            continue
    return versions
