"""The model of a run: its files, and the target on this machine's device."""

from __future__ import annotations

import socket
from dataclasses import replace

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import at_commit
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.drafters.catalogue import slots_wanted
from swiftbatch.worker.forward.hardware import resolve_device
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.digests import digests_of
from swiftbatch.worker.model.lora import LoraFiles, locate_loras
from swiftbatch.worker.model.model_files import ModelFiles, OtherModelError, locate_model
from swiftbatch.worker.session.checkpointing import num_unwritten


def located_model(model: str, run: Run) -> ModelFiles:
    """Find the files of a run's model.

    Raises ModelError as `locate_model` does, OtherModelError if files differ from the run's.
    """
    expected = run.manifest.model_files
    files = locate_model(at_commit(model, run.manifest.model_commit), expected)
    files.refuse_other(expected)
    return files


def located_loras(run: Run) -> list[LoraFiles]:
    """Find a run's adapters. Raises ModelError if one is missing, OtherModelError if files differ from the run's."""
    found = locate_loras(run.manifest.lora, run.manifest.lora_commits)
    for each in found:
        if each.digests != run.manifest.lora_files[each.name]:
            node, expected = socket.gethostname(), "expected those that the run was made with; put them back"
            raise OtherModelError(f"adapter {each.name}: on node {node} {each.path} has other files, {expected}")
    return found


def loaded_target(config: EngineConfig, files: ModelFiles, run: Run, textless_ids: tuple[int, ...]) -> TargetModel:
    """Load the model. Raises OtherModelError if a file changed meanwhile, and errors as `TargetModel.load` does."""
    computed = (config.dtype, config.device, config.kv_offload, _slots(config, files, run), config.cuda_kernels)
    loras, num_ranks = located_loras(run), config.num_gpus_per_worker
    target = TargetModel.load(files, *computed, config.kv_dtype, textless_ids, loras, num_ranks)
    _refuse_changed_meanwhile(files)
    return target


def _slots(config: EngineConfig, files: ModelFiles, run: Run) -> SlotsWanted | None:
    """Return the slots for the run's longest job on a GPU, or None on a CPU."""
    longest_job = 0 if resolve_device(config.device).type == "cpu" else run.longest_job()
    if not longest_job:
        return None
    wanted = slots_wanted(config.engine, files, config.dtype, longest_job, config.draft_model, config.engine_options)
    return replace(wanted, num_unwritten=num_unwritten(config))


def _refuse_changed_meanwhile(files: ModelFiles) -> None:
    """Raise OtherModelError if a small file has changed since `files` was made."""
    expected = {**files.digests.model, **files.digests.text}
    replace(files, digests=digests_of(files.path, files.digests.model)).refuse_other(expected)
