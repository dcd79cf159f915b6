"""Commands around the runs: doctor, train."""

from __future__ import annotations

from pathlib import Path

import click

from scheduler.model_options import DEVICE, DTYPE, MODEL, THREADS, num_cores


@click.command()
@MODEL
@DTYPE
@DEVICE
@THREADS
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def doctor(model: str, dtype: str, device: str, threads: int | None, as_json: bool) -> None:
    """Probe whether speculative decoding gives the very same bits on this machine with this model.

    The verdict is `exact`, or `exact up to ties` where rounding differs.

    \b
    Example:
      swiftbatch doctor --model embedded
    """
    from worker.config import EngineConfig
    from worker.doctor import diagnose

    values = {"model": model, "dtype": dtype, "device": device, "num_threads": threads or num_cores()}
    diagnosis = diagnose(EngineConfig.model_validate(values))
    click.echo(diagnosis.model_dump_json(indent=2) if as_json else diagnosis.summary())


@click.group()
def train() -> None:
    """Train models.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """


@train.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSONL files with `text`, or a folder.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
def target(data: Path, output: Path) -> None:
    """Train a small target model from scratch, as the embedded one was.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """
    from worker.training.recipe import EMBEDDED_RECIPE
    from worker.training.target import train_target

    train_target(data, output, EMBEDDED_RECIPE, click.echo)


@train.command()
@MODEL
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSONL files with `text`, or a folder.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
@click.option("--steps", "num_steps", type=click.IntRange(1), default=200, show_default=True)
@click.option(
    "--own-texts",
    "num_own_texts",
    type=click.IntRange(0),
    default=0,
    help="Learn from so many texts of the model's own.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def tokenswift(model: str, data: Path, output: Path, num_steps: int, num_own_texts: int, seed: int) -> None:
    """Train a model's decoding heads for the engine `tokenswift`; the model itself stays as it is.

    They learn from the beginnings of the books in *train*.jsonl, or with --own-texts from what the model itself says
    behind parts of them; accuracy is measured on *test*.jsonl. The embedded model's were made with --own-texts 512.

    \b
    Example:
      swiftbatch train tokenswift --model my-model --data books --output my-model
    """
    from worker.training.head_recipe import HeadRecipe
    from worker.training.tokenswift import train_heads

    recipe = HeadRecipe(num_steps=num_steps, num_own_texts=num_own_texts, seed=seed)
    train_heads(model, data, output, recipe, click.echo)


@train.command()
@MODEL
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSONL files with `text`, or a folder.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
@click.option("--steps", "num_steps", type=click.IntRange(1), default=1500, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def draft(model: str, data: Path, output: Path, num_steps: int, seed: int) -> None:
    """Train a small draft model for the engine `triforce`; the model itself stays as it is.

    It learns the model's distributions along the books in *train*.jsonl and along what the model itself says behind
    parts of them; how often both draw the same token is measured on *test*.jsonl. Beside the model's weights, in a
    folder `draft`, it is found without --draft-model.

    \b
    Example:
      swiftbatch train draft --model my-model --data books --output my-model/draft
    """
    from worker.training.draft import train_draft
    from worker.training.draft_recipe import draft_recipe

    train_draft(model, data, output, draft_recipe(num_steps, seed), click.echo)
