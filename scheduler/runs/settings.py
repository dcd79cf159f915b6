"""What belongs to a run and stays the same over all its attempts: model, engine, numerics, seed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from jobs.run.run import Run, RunError, RunManifest
from jobs.storage.retries import NO_RETRIES, Retries
from jobs.storage.uris import shown_uri
from worker.config import EngineConfig
from worker.exactness.verdicts import known_verdict, verdict_key
from worker.model.files import ModelError, ModelFiles, locate_model


@dataclass(frozen=True)
class Settings:
    """What the user asked for; None where nothing was said."""

    model: str | None = None
    engine: str | None = None
    draft_model: str | None = None
    kv_offload: str | None = None
    dtype: str | None = None
    device: str | None = None
    num_threads: int | None = None
    seed: int | None = None
    num_workers: int = 1  # shares the cores where no number of threads was asked for
    address: str | None = None  # of a running cluster, whose devices are not this machine's
    retries: Retries = NO_RETRIES  # of the store


def kept_or_new_manifest(run_uri: str, settings: Settings) -> RunManifest:
    """The manifest of the run there, checked against the settings; a new one, yet without fingerprint, for a new run.

    Raises RunError if the settings differ from the run's.
    """
    try:
        manifest = Run.open(run_uri, settings.retries).manifest
    except RunError:  # no run there, or one that can't be read: `Run.create_or_open` tells them apart
        return _new_manifest(settings)
    asked = {
        "model": _place(settings.model) if settings.model else None,
        "engine": settings.engine,
        "dtype": settings.dtype,
        "device": settings.device,
        "num_threads": settings.num_threads,
        "seed": settings.seed,
    }
    for name, value in asked.items():
        if value is not None and value != getattr(manifest, name):
            raise RunError(
                f"the run at {shown_uri(run_uri)} was made with {name} {getattr(manifest, name)}, found {value}; "
                "leave the option away, or use another run folder"
            )
    return manifest


def with_model(manifest: RunManifest, files: ModelFiles) -> RunManifest:
    """The manifest with the model's fingerprint, and what `swiftbatch doctor` found for it on this machine."""
    from worker.target.hardware import hardware_of  # which needs torch; the tokenizer brings it in anyway

    torch_version = manifest.versions["torch"]
    key = verdict_key(
        files.fingerprint,
        manifest.dtype,
        manifest.device,
        manifest.num_threads,
        hardware_of(manifest.device),
        torch_version,
    )
    return manifest.model_copy(
        update={
            "model_fingerprint": files.fingerprint,
            "text_fingerprint": files.text_fingerprint,
            "exactness": known_verdict(key),
        }
    )


def refuse_changed_model(run: Run) -> None:
    """Raise RunError where the model's files here are not those that the run was made with.

    Where there are none, the run may be at its end, or a cluster's workers may have them: those say if they do not.
    """
    with contextlib.suppress(ModelError):
        files = locate_model(run.manifest.model)
        run.refuse_other_model(files.fingerprint, files.text_fingerprint)


def _new_manifest(settings: Settings) -> RunManifest:
    import torch  # the tokenizer brings it in anyway

    defaults = EngineConfig()
    has_own_gpu = settings.address is None and torch.cuda.is_available()
    detected = "auto" if settings.address is not None else "cuda" if has_own_gpu else "cpu"
    num_cores = len(os.sched_getaffinity(0))
    return RunManifest(
        run_id=f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}",
        created=time.time(),
        model=_place(settings.model or defaults.model),
        model_fingerprint="",
        engine=settings.engine or defaults.engine,
        draft_model=settings.draft_model and os.path.abspath(settings.draft_model),
        kv_offload=settings.kv_offload and os.path.abspath(settings.kv_offload),
        dtype=settings.dtype or defaults.dtype,
        device=settings.device if settings.device not in (None, "auto") else detected,
        num_threads=settings.num_threads or max(1, num_cores // settings.num_workers),
        seed=settings.seed or 0,
        versions=_versions(),
        exactness="not probed",
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def _place(model: str) -> str:
    """A folder's absolute path, since workers run in other folders; any other name as it is."""
    return os.path.abspath(model) if model != "embedded" and Path(model).is_dir() else model


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("swiftbatch", "torch", "transformers", "ray"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            continue
    return versions
