"""The command `quantize`: a plain model in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swiftbatch.scheduler.commands.options.option_types import say

if TYPE_CHECKING:
    from swiftbatch.worker.model.model_files import ModelFiles

FORMATS = ("int4", "int8", "fp8")


@click.command()
@click.argument("model")
@click.option("--format", "format_", type=click.Choice(FORMATS), required=True, help="How weights are stored.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new model: new, or an empty one."
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Score both models on this text, UTF-8, and print nats per token.",
)
def quantize(model: str, format_: str, output: Path, text: Path | None) -> None:
    """Write a model with its weights in 8 or 4 bits.

    MODEL is `embedded`, a folder or a hub id. The matrices of its layers are rounded to the nearest code, tensor by
    tensor: int4 and int8 with a scale for 32 weights (compressed-tensors), fp8 with one for a block. Embeddings, head,
    norms and routers of experts stay as they are. Other programs read the folder, too.

    \b
    Example:
      swiftbatch quantize Qwen/Qwen3-0.6B --format int8 --output qwen3-int8 --text book.txt
    """
    from swiftbatch.worker.model.model_files import locate_model
    from swiftbatch.worker.quantizing import quantize_model

    files = locate_model(model)
    token_ids = None if text is None else _token_ids(files, text)
    made = quantize_model(files, format_, output)
    click.echo(
        f"{made.num_matrices:,} matrices in {format_}; weights: {made.bytes_before:,} bytes before, "
        f"{made.bytes_after:,} now"
    )
    if len(made.left) > 1:
        click.echo(f"as they were: {', '.join(made.left[:5])}{' and others' if len(made.left) > 5 else ''}")
    click.echo(f"wrote {output}; use it with --model {output}")
    if token_ids is not None:
        _score(files, locate_model(str(output)), token_ids)


def _token_ids(files: ModelFiles, text: Path) -> list[int]:
    """Raise UsageError, ModelError if the text has no tokens."""
    from swiftbatch.worker.quantizing import text_token_ids

    try:
        return text_token_ids(files, text.read_text(encoding="utf-8"))
    except UnicodeError as error:
        raise click.UsageError(f"--text {text}: expected UTF-8 ({error})") from None


def _score(before: ModelFiles, after: ModelFiles, token_ids: list[int]) -> None:
    from swiftbatch.worker.forward.target_model import TargetModel
    from swiftbatch.worker.quantizing import text_loss

    say(f"scoring {len(token_ids):,} tokens with both models")
    losses = [text_loss(TargetModel.load(files, "bfloat16", "auto"), token_ids) for files in (before, after)]
    click.echo(
        f"nats per token: {losses[0]:.4f} before, {losses[1]:.4f} now ({losses[1] - losses[0]:+.4f}), "
        f"on {len(token_ids):,} tokens"
    )
