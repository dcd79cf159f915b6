"""A GRIFFIN training on its way: which one a folder holds, what is done, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from worker.drafters.griffin.model import GriffinModel
from worker.model.files import GRIFFIN_FILE, ModelError
from worker.training.feature_file import differing
from worker.training.griffin.recipe import GriffinRecipe

LOG, STATE = "griffin_log.jsonl", "griffin_state.pt"


class TrainingFolder:
    """The folder of one training. The log's first record says which one it is; the state is there until its end."""

    def __init__(self, path: Path, model_fingerprint: str, recipe: GriffinRecipe) -> None:
        self.path = path
        self._identity = json.loads(json.dumps({"model": model_fingerprint, "recipe": asdict(recipe)}))

    def is_finished(self) -> bool:
        """Whether this training is over. Raises ModelError where the folder holds another one."""
        has_state = (self.path / STATE).is_file()
        if not has_state and not (self.path / GRIFFIN_FILE).is_file():
            return False
        found = next(iter(self.records()), {})
        if differences := differing(found, self._identity):
            what = "; ".join(differences) if found else f"no {LOG} tells how its draft model was trained"
            raise ModelError(
                f"output {self.path}: holds another training: {what}; name another folder, or delete {GRIFFIN_FILE} "
                f"and {STATE} there"
            )
        return not has_state

    def records(self) -> list[dict[str, Any]]:
        """All whole records of the log: a kill may have torn the last one."""
        path = self.path / LOG
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def open_log(self, step: int) -> IO[str]:
        """The log to append to, with the records up to a step in it that this training has behind it."""
        kept = [record for record in self.records() if 0 <= record.get("step", 0) <= step] if step else []
        kept = [record for record in kept if record.get("when") != "after"] or [self._identity]
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{LOG}"
        aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(aside, self.path / LOG)
        return (self.path / LOG).open("a", encoding="utf-8")

    def save(self, model: GriffinModel, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
        """Write all that the next steps depend on, as a whole."""
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        aside = self.path / f".{STATE}"
        torch.save(parts, aside)
        os.replace(aside, self.path / STATE)

    def restore(self, model: GriffinModel, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """Load the state, if there is one; returns the steps and seconds behind it."""
        path = self.path / STATE
        if not path.is_file():
            return 0, 0.0
        try:
            parts = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(parts["model"])
            optimizer.load_state_dict(parts["optimizer"])
            return int(parts["step"]), float(parts["seconds"])
        except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{path}: cannot be read ({problem}); delete it to train from the beginning") from error

    def finish(self) -> None:
        """Forget the state: the weights are there."""
        (self.path / STATE).unlink()
