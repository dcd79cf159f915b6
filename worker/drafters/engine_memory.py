"""GPU memory that an engine needs beside the target's weights, computed without torch or a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import EngineEntry, engine_entry
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.kv_capacity import ITEM_SIZES
from swiftbatch.worker.kv.model_sizes import num_parameters, read_sizes
from swiftbatch.worker.model.model_files import ModelFiles, locate_model


def slots_wanted(engine: str, files: ModelFiles, dtype: str, longest_job: int, parts: str | Path | None) -> SlotsWanted:
    """Return the slots for jobs of up to `longest_job` positions; `parts` is the folder of `--draft-model`.

    Raises ModelError as `check_parts` does.
    """
    entry, folder = engine_entry(engine), None if parts is None else Path(parts)
    wanted = SlotsWanted(longest_job, entry.partial_budget, scanned_best=entry.scanned_best)
    if entry.tries is not None:
        return with_tried(wanted, entry.tries, files, folder)
    if entry.part is None:
        return wanted
    path = entry.part.find(files.name, files.path, files.fingerprint, folder)
    return _with_part(wanted, entry, path, dtype, files)


def with_tried(wanted: SlotsWanted, engine: str, files: ModelFiles, parts_folder: Path | None) -> SlotsWanted:
    entry = engine_entry(engine)
    if entry.part is None:
        return wanted
    try:
        path = entry.part.find(files.name, files.path, files.fingerprint, parts_folder)
    except ModelError:
        return wanted
    return replace(wanted, engine=entry.memory_of(path, files), can_lack_engine=True)


def _with_part(wanted: SlotsWanted, entry: EngineEntry, path: Path, dtype: str, files: ModelFiles) -> SlotsWanted:
    if (engine := entry.memory_of(path, files)) is not None:
        return replace(wanted, engine=engine)
    if path.is_dir():
        return replace(wanted, draft=read_sizes(locate_model(str(path)), dtype), draft_length=entry.draft_length)
    logit_bytes = NUM_ROWS * files.vocab_size * 4  # logits of the heads
    return replace(wanted, part_bytes=num_parameters([path]) * ITEM_SIZES[dtype] + logit_bytes)
