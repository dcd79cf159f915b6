"""Training of GRIFFIN's draft model behind a frozen target: `swiftbatch train griffin`.

The paper's (section 4.1, appendix C), but for two things: half of the windows come from the target's own texts, and the
labels are the target's distributions. What the draft model is to guess is what the target draws, under the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swiftbatch.worker.model.model_files import GRIFFIN_FILE, ModelFiles, locate_model
from swiftbatch.worker.papers.griffin.griffin_weights import save_griffin
from swiftbatch.worker.papers.griffin.model import GriffinModel
from swiftbatch.worker.papers.griffin.training.accuracy import measure_accuracy
from swiftbatch.worker.papers.griffin.training.feature_texts import (
    FOLDER,
    FeatureWindowSource,
    GriffinFeatures,
    griffin_features,
)
from swiftbatch.worker.papers.griffin.training.passes import accumulate_gradients
from swiftbatch.worker.papers.griffin.training.recipe import GriffinRecipe
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.training.held_folder import held
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, write_measured, write_record
from swiftbatch.worker.training.training_loop import check_loss
from swiftbatch.worker.training.training_texts import load_target

FILES = TrainingFiles("griffin_log.jsonl", "griffin_state.pt", GRIFFIN_FILE)
PLOT = "griffin_training.png"
NUM_STATE_STEPS = 100  # between two states, and two points of the accuracy curve
NUM_CURVE_TEXTS = 2  # that the curve is measured on, of the first name
WIDTH_INCHES, HEIGHT_INCHES, DPI = 11.0, 4.2, 150
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))  # of the passes and forwards: told apart without colours
SMOOTHING = 0.9  # running mean of the losses: a step's windows differ much


@dataclass(frozen=True)
class GriffinStepRecord:
    """One optimiser step, as the log keeps it."""

    step: int
    losses: list[float]  # of each pass: nats per token and the weighted distance of features
    aligned: list[float]  # share of the rows that each pass learns from
    seconds: float


def train_griffin(
    model: str,
    data: Path,
    output: Path,
    recipe: GriffinRecipe,
    report: Callable[[str], None],
    features: Path | None = None,
) -> None:
    """Train a draft model for a model on books under `data` and own texts; write it, its log and a plot to `output`.

    The target's features lie in `features`, or in a folder in `output`, and are computed where they are not there. A
    training that was killed goes on, to the same weights; one that is finished is left as it is. Where `data` has test
    books (`*test*.jsonl`), accuracy is measured. Raises ModelError and CorpusError.
    """
    files = locate_model(model)
    with held(output):
        _train(files, data, output, recipe, report, features or output / FOLDER)


def _train(
    files: ModelFiles, data: Path, output: Path, recipe: GriffinRecipe, report: Callable[[str], None], features: Path
) -> None:
    folder = griffin_folder(output, files.fingerprint, recipe)
    if folder.is_finished():
        report(f"{output}: holds this training, finished; nothing to do")
        return
    target = load_target(files)
    texts = griffin_features(target, data, features, recipe, report)
    torch.manual_seed(recipe.seed)
    draft = GriffinModel(recipe.config(target.model.config)).to(target.device)
    run_training(draft, target, texts, recipe, folder, report)
    save_griffin(output, draft, files.fingerprint)
    with folder.open_log(recipe.num_steps) as log:
        write_measured(log, measure_accuracy("after", recipe.num_steps, target, draft, texts.held_out), report)
    plot_training(folder.records(), output / PLOT)
    folder.finish()


def griffin_folder(path: Path, model_fingerprint: str, recipe: GriffinRecipe) -> TrainingFolder:
    """The folder of a training for one model with one recipe."""
    return TrainingFolder(path, FILES, {"model": model_fingerprint, "recipe": asdict(recipe)})


def run_training(
    draft: GriffinModel,
    target: TargetModel,
    texts: GriffinFeatures,
    recipe: GriffinRecipe,
    folder: TrainingFolder,
    report: Callable[[str], None],
) -> None:
    """All steps that are left, from the state in the folder; every `NUM_STATE_STEPS` a new one."""
    optimizer = torch.optim.AdamW(draft.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    step, seconds = folder.restore(draft, optimizer)
    report(f"{sum(p.numel() for p in draft.parameters()):,} parameters, {step} of {recipe.num_steps} steps behind it")
    source = FeatureWindowSource(texts.books, texts.own, recipe)
    with folder.open_log(step) as log:
        if step == 0:
            write_measured(log, measure_accuracy("before", 0, target, draft, texts.held_out), report)
            folder.save(draft, optimizer, step, seconds)
        for done in run_steps(draft, target, source, recipe, optimizer, step, seconds):
            write_record(log, done)
            if done.step % NUM_STATE_STEPS == 0:
                for record in measure_accuracy("during", done.step, target, draft, texts.held_out[:NUM_CURVE_TEXTS]):
                    write_record(log, record)
                folder.save(draft, optimizer, done.step, done.seconds)


def run_steps(
    draft: GriffinModel,
    target: TargetModel,
    source: FeatureWindowSource,
    recipe: GriffinRecipe,
    optimizer: torch.optim.Optimizer,
    first: int,
    seconds: float,
) -> Iterator[GriffinStepRecord]:
    """Train from step `first` (0 at the beginning), `seconds` behind it, and yield every step when it is done."""
    start = time.monotonic() - seconds
    columns = (TextColumn("griffin"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("griffin", total=recipe.num_steps, completed=first, loss=float("nan"))
        for step in range(first, recipe.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(step, draft.config.hidden_size)
            losses, aligned = accumulate_gradients(draft, target, source.windows(step, target.device), recipe.at(step))
            check_loss(step + 1, sum(losses))
            torch.nn.utils.clip_grad_value_(draft.parameters(), recipe.clip_value)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(task, advance=1, loss=losses[0])
            yield GriffinStepRecord(step + 1, losses, aligned, round(time.monotonic() - start, 2))


def plot_training(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the records of a training log into a PNG file."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    losses, accuracy = figure.subplots(1, 2)
    _losses(losses, [record for record in records if "losses" in record])
    _accuracy(accuracy, [record for record in records if "same" in record])
    figure.savefig(path, dpi=DPI, format="png")


def _losses(axes: Axes, steps: list[dict[str, Any]]) -> None:
    """Loss of every pass, smoothed, over the steps that had it."""
    for number in range(max(len(step["losses"]) for step in steps)):
        known = [(step["step"], step["losses"][number]) for step in steps if number < len(step["losses"])]
        means = [known[0][1]]
        for _, loss in known[1:]:
            means.append(SMOOTHING * means[-1] + (1 - SMOOTHING) * loss)
        _line(axes, number, [step for step, _ in known], means, f"pass {number + 1}")
    axes.set_title("Loss of each pass over its aligned rows", fontsize=10)
    axes.set_ylabel("loss [nats and 0.1 x L1]")
    _finish(axes)


def _accuracy(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Share of the target's tokens by forward along what is measured most often, with the noise at T = 1."""
    measured = [record for record in records if record["texts"] == records[0]["texts"]]
    for forward in range(len(measured[0]["same"]["T 1"]) if measured else 0):
        shares = [record["same"]["T 1"][forward] for record in measured]
        _line(axes, forward, [record["step"] for record in measured], shares, f"forward {forward + 1}")
    name = f", {measured[0]['texts']}" if measured else ""
    axes.set_title(f"The target's token, T = 1 with its noise{name}", fontsize=10)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.0)
    _finish(axes)


def _line(axes: Axes, number: int, steps: list[int], values: list[float], label: str) -> None:
    axes.plot(steps, values, linestyle=STYLES[number % len(STYLES)], linewidth=1.6, label=label)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="white", fontsize=9, ncols=2)
