"""Comparison of the loaded model with the run's."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.model.digests import digests_of
from swiftbatch.worker.model.hub import at_commit
from swiftbatch.worker.model.model_files import ModelFiles, locate_model


def located_model(model: str, run: Run) -> ModelFiles:
    """Find the files of a run's model.

    Raises ModelError as `locate_model` does, OtherModelError if files differ from the run's.
    """
    expected = run.manifest.model_files
    files = locate_model(at_commit(model, run.manifest.model_commit), expected)
    files.refuse_other(expected)
    return files


def refuse_changed_meanwhile(files: ModelFiles) -> None:
    """Raise OtherModelError if a small file has changed since `files` was made."""
    expected = {**files.digests.model, **files.digests.text}
    replace(files, digests=digests_of(files.path, files.digests.model)).refuse_other(expected)
