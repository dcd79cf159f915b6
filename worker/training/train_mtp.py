"""Training of a multi-token prediction layer for a frozen target: `swiftbatch train mtp`.

Pass n reads the outputs of pass n - 1 at the previous row instead of hidden states, so the layer learns to draft
chains.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from swiftbatch.worker.drafters.catalogue import FINGERPRINT
from swiftbatch.worker.drafters.mtp.predictor import PredictorModule
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.model_files import MTP_FILE, let_others_read, locate_model, read_config
from swiftbatch.worker.training.data_parallel import Report, share_of, sum_gradients, total
from swiftbatch.worker.training.feature_files import FOLDER, TextFeatures
from swiftbatch.worker.training.feature_windows import GriffinFeatures, Windows, griffin_features
from swiftbatch.worker.training.recipes import GriffinRecipe, MTPRecipe
from swiftbatch.worker.training.train_griffin import token_loss
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held
from swiftbatch.worker.training.training_loop import Optimizers, PartTraining, Step, train_part, whole_step
from swiftbatch.worker.training.training_texts import load_target

FILES = TrainingFiles("mtp_log.jsonl", "mtp_state.pt", MTP_FILE, "mtp_training.png")


@dataclass(frozen=True)
class MTPAccuracyRecord:
    """Share of rows where the layer's best token is the target's, by pass, along held-out texts."""

    when: str
    step: int
    texts: str
    num_rows: int
    same: list[float]

    def in_words(self) -> str:
        shares = " / ".join(f"{share:.1%}" for share in self.same)
        return f"{self.when} training, {self.texts}: the target's best token by pass {shares}"


def train_mtp(
    model: str, data: Path, output: Path, recipe: MTPRecipe, report: Report, features: Path | None = None
) -> None:
    """Train a layer on books under `data` and own texts; write it and its log to `output`.

    A killed training resumes. A finished training is kept. Raises ModelError and CorpusError.
    """
    files = locate_model(model)
    with held(output):
        folder = TrainingFolder(output, FILES, {"model": files.fingerprint, "recipe": asdict(recipe)})
        if folder.is_finished(report):
            return
        target = load_target(files)
        shared = GriffinRecipe(texts=recipe.texts, window_length=recipe.window_length)
        texts = griffin_features(target, data, features or output / FOLDER, shared, report)
        torch.manual_seed(recipe.seed)
        module = PredictorModule(read_config(files.name, files.path)).to(target.device).train()
        module.begin_as(decoder_of(target.model))
        run_training(module, target, texts, recipe, folder, report)


def save_mtp(folder: Path, module: PredictorModule, model_fingerprint: str) -> None:
    """Write the layer in bf16, with its target's fingerprint, to `folder`."""
    tensors = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in module.tensors().items()}
    save_file(tensors, folder / MTP_FILE, metadata={FINGERPRINT: model_fingerprint})
    let_others_read(folder / MTP_FILE)


def run_training(
    module: PredictorModule,
    target: TargetModel,
    texts: GriffinFeatures,
    recipe: MTPRecipe,
    folder: TrainingFolder,
    report: Report,
) -> None:
    optimizers = Optimizers(module, recipe.steps())

    def take_step(step: int) -> Step:
        windows = draw_windows(texts, recipe, step, target.device)
        loss = accumulate_gradients(module, target, windows, recipe.passes_at(step))
        sum_gradients(module)
        optimizers.step(step)
        return whole_step("mtp", recipe.num_step_windows * recipe.window_length, loss)

    def measured(when: str, _: int) -> list[MTPAccuracyRecord]:
        return measure(module, target, texts.held_out, recipe) if when == "after" else []

    def save() -> None:
        save_mtp(folder.path, module, target.files.fingerprint)

    train_part(folder, PartTraining(module, optimizers, recipe.num_steps, take_step, measured, save), report)


def draw_windows(texts: GriffinFeatures, recipe: MTPRecipe, step: int, device: torch.device) -> Windows:
    """Return this process's windows of a step, which depend on the recipe's seed and the step's number."""
    random, length = np.random.default_rng([recipe.seed, step]), recipe.window_length
    num_own = round(recipe.own_share * recipe.num_step_windows) if texts.own else 0
    picks: list[tuple[TextFeatures, np.ndarray]] = []
    for among, number in ((texts.books, recipe.num_step_windows - num_own), (texts.own, num_own)):
        for _ in range(number):
            text = among[random.integers(len(among))]
            start = int(random.integers(max(0, len(text.token_ids) - length) + 1))
            picks.append((text, np.arange(start, min(start + length, len(text.token_ids)))))
    return Windows.gather(share_of(picks), device)


def accumulate_gradients(module: PredictorModule, target: TargetModel, windows: Windows, num_passes: int) -> float:
    """Add the gradients of all passes' losses; return the first pass's, in nats per token."""
    outputs = forward_passes(module, target, windows, num_passes)
    losses, gradients = [], []
    for number, output in enumerate(outputs):
        counted = windows.num_before > number  # a window's first rows have no known predecessors
        loss, gradient, _ = token_loss(target, output, windows, counted)
        num_rows = total(counted.sum()).clamp(min=1)
        losses.append(float(total(loss) / num_rows))
        gradients.append(gradient / num_rows / len(outputs))
    torch.autograd.backward(outputs, gradients)
    return round(losses[0], 4)


def forward_passes(
    module: PredictorModule, target: TargetModel, windows: Windows, num_passes: int
) -> list[torch.Tensor]:
    """Return each pass's input of the head, `[num_windows, length, hidden]`."""
    outputs: list[torch.Tensor] = []
    with torch.autocast(target.device.type, dtype=torch.bfloat16):
        embeddings = target.model.get_input_embeddings()(windows.token_ids)
        hidden = windows.inputs.to(embeddings.dtype)
        for _ in range(num_passes):
            outputs.append(module(hidden, embeddings))
            hidden = outputs[-1].roll(1, dims=1)
    return outputs


@torch.no_grad()
def measure(
    module: PredictorModule, target: TargetModel, texts: list[TextFeatures], recipe: MTPRecipe
) -> list[MTPAccuracyRecord]:
    """Return records of accuracy along the starts of held-out texts, one per name."""
    records = []
    for name, named in groupby(texts, key=lambda text: text.name):
        same = torch.cat([_same(module, target, text, recipe) for text in named], dim=1)
        shares = [round(share, 4) for share in same.float().mean(dim=1).tolist()]
        records.append(MTPAccuracyRecord("after", recipe.num_steps, name, same.shape[1], shares))
    return records


def _same(module: PredictorModule, target: TargetModel, text: TextFeatures, recipe: MTPRecipe) -> torch.Tensor:
    """Return whether each pass's token is the target's at the rows of a text, `[num_passes, num_rows]`."""
    windows = Windows.gather([(text, np.arange(min(len(text.token_ids), recipe.window_length)))], target.device)
    said = target.logits(windows.features[0]).argmax(dim=-1)
    outputs = forward_passes(module, target, windows, recipe.num_passes)
    guessed = [target.logits(output[0].to(target.dtype)).argmax(dim=-1) for output in outputs]
    first = max(text.first_row, recipe.num_passes)
    return torch.stack([tokens == said for tokens in guessed])[:, first:].cpu()
