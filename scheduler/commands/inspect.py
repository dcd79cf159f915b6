"""The command `inspect`: a model and how it would run, without its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from swiftbatch.scheduler.commands.exit_codes import SOME_FAILED
from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES

if TYPE_CHECKING:
    from swiftbatch.worker.inspection import Inspection
    from swiftbatch.worker.model.compute_path import ComputePath


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def inspect(models: tuple[str, ...], as_json: bool) -> None:
    """Show what a model is, whether it runs here, and how fast its layers are computed.

    Reads the config, the index and the headers of the weights alone: a model on the hub or in a bucket costs a few
    KB. The exit code is 1 if a model does not run.

    \b
    Example:
      swiftbatch inspect Qwen/Qwen3-0.6B ./my-model
    """
    from swiftbatch.jobs.errors import ModelError
    from swiftbatch.worker.inspection import inspect_model

    has_failed = False
    for number, model in enumerate(models):
        try:
            found = inspect_model(model)
        except ModelError as error:
            has_failed = True
            click.echo(json.dumps({"model": model, "refusal": str(error)}) if as_json else f"{model}\n  {error}")
            continue
        has_failed |= found.refusal is not None
        if number and not as_json:
            click.echo()
        click.echo(found.model_dump_json() if as_json else page(found))
    if has_failed:
        click.get_current_context().exit(SOME_FAILED)


def page(found: Inspection) -> str:
    kind = found.kind if found.kind == found.text_kind else f"{found.kind}, its text as {found.text_kind}"
    rows = [("kind", kind)]
    if found.num_parameters:
        formats = ", ".join(f"{number:,} in {dtype}" for dtype, number in found.formats.items())
        rows.append(("parameters", f"{found.num_parameters:,} of the text model; stored: {formats}"))
    if found.quantization:
        bytes_ = f", {found.num_bytes:,} bytes" if found.num_bytes else ""
        rows.append(("quantized", f"{found.quantization}{bytes_}; runs dequantized, in bfloat16 or float32"))
    if found.refusal:
        rows.append(("runs here", f"no: {found.refusal}"))
    else:
        rows += _running(found)
    width = max(len(name) for name, _ in rows)
    return "\n".join([found.model, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _running(found: Inspection) -> list[tuple[str, str]]:
    rows = [("runs here", "yes" if found.num_bytes else "yes, by its config: its weights were not seen")]
    if found.max_positions:
        rows.append(("positions", f"{found.max_positions:,}"))
    if found.bytes_per_position:
        rows.append(("cache", _cache(found)))
    if found.state_bytes:
        rows.append(
            ("states", f"{found.state_bytes:,} bytes per job; {found.checkpointed_state_bytes:,} in a checkpoint")
        )
    rows += [(name, _path(path)) for name, path in (("on a CPU", found.cpu), ("on a GPU", found.cuda)) if path]
    if found.slots:
        slots = ", ".join(f"{number} of {length:,}" for length, number in found.slots.items())
        rows.append(
            ("80-GB GPU", f"jobs at a time, by positions, in forwards of up to {ROW_CHOICES[-1]} rows: {slots}")
        )
    if found.gpus:
        fewest = ", ".join(f"{number} for {length:,}" for length, number in found.gpus.items())
        rows.append(("80-GB GPUs", f"--gpus-per-worker for one job, by positions: {fewest}"))
    thinking = f"; thinks between {' and '.join(found.thinking_markers)}" if found.thinking_markers else ""
    rows.append(("chat", f"{'template' if found.has_chat_template else 'no template'}{thinking}"))
    if found.predictor:
        rows.append(("MTP layers", found.predictor))
    rows.append(("engines", ", ".join(found.engines)))
    return rows


def _cache(found: Inspection) -> str:
    words = f"{found.bytes_per_position:,} bytes per position in bfloat16"
    if found.num_whole_positions is not None:
        words += f"; on a CPU {found.bytes_per_old_position:,} behind the newest {found.num_whole_positions:,}"
    return words


def _path(path: ComputePath) -> str:
    """Describe a device path: what computes it, and why not faster."""
    words = {
        "kernels": "swiftbatch's kernels",
        "kernels attend": "swiftbatch's kernels attend, the layers of transformers multiply",
        "transformers": "the layers of transformers, slowly",
        "none": "does not run",
    }
    return words[path.name] + (f": {path.reason}" if path.reason else "")
