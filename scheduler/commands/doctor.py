"""The command `doctor`: what this machine makes of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swiftbatch.scheduler.commands.options.option_types import (
    COMPUTING,
    CUDA_KERNELS,
    KV_DTYPE_HELP,
    KV_DTYPES,
    MODEL,
    ROWS,
    ROWS_HELP,
    say,
)
from swiftbatch.worker.config import Computation

if TYPE_CHECKING:
    from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import FirstRun

TO_STDOUT = "-"


@click.command()
@MODEL
@COMPUTING
@CUDA_KERNELS
@click.option("--rows", "num_rows", type=ROWS, default=Computation.num_rows, help=ROWS_HELP)
@click.option("--kv-dtype", type=KV_DTYPES, help=KV_DTYPE_HELP)
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=TO_STDOUT,
    metavar="[FILE]",
    help="Write one JSON object to a file, or as the only output.",
)
def doctor(json_path: str | None, **options: Any) -> None:
    """Test whether speculative decoding gives the same bits as plain decoding, on this machine with this model.

    The verdict is `exact`, or `exact up to ties` if rounding differs. The forward is also compared with that of
    transformers; if it differs, the exit code is 1. On a GPU, all parts that a run depends on are tested in order. The
    first failure ends the test with exit code 1.

    \b
    Example:
      swiftbatch doctor --model embedded
      swiftbatch doctor --model embedded --device cuda --json doctor.json
    """
    from swiftbatch.worker.exactness.doctor import diagnose

    config = Computation(**options)
    show = say if json_path == TO_STDOUT else click.echo
    if (first_run := _on_a_gpu(config, show)) is not None:
        show(first_run.page())
        _write(first_run.model_dump_json(indent=2), json_path)
        click.get_current_context().exit(0 if first_run.failed is None else 1)
    diagnosis = diagnose(config)
    if json_path != TO_STDOUT:
        show(diagnosis.summary())
    _write(diagnosis.model_dump_json(indent=2), json_path)
    if not diagnosis.agreement.agrees:
        click.get_current_context().exit(1)


def _on_a_gpu(config: Computation, show: Any) -> FirstRun | None:
    """Return None on a CPU or without kernels."""
    from swiftbatch.worker.forward.hardware import resolve_device
    from swiftbatch.worker.kernels.gpu_kernel_choice import refuse_kv_dtype

    if resolve_device(config.device).type != "cuda":
        config.cuda_kernels.refuse_rows("the device is a CPU")
        return None
    refuse_kv_dtype(config.kv_dtype, config.cuda_kernels.attention)
    from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import first_run

    return first_run(config, show)


def _write(document: str, json_path: str | None) -> None:
    if json_path == TO_STDOUT:
        click.echo(document)
    elif json_path is not None:
        Path(json_path).write_text(document + "\n", encoding="utf-8")
