"""The command `doctor`: what this machine makes of a model."""

from __future__ import annotations

from typing import Any

import click

from scheduler.commands.model_options import COMPUTING, MODEL


@click.command()
@MODEL
@COMPUTING
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def doctor(as_json: bool, **options: Any) -> None:
    """Probe whether speculative decoding gives the very same bits on this machine with this model.

    The verdict is `exact`, or `exact up to ties` where rounding differs. The forward is compared with that of
    transformers, too; the exit code is 1 where it is another one.

    \b
    Example:
      swiftbatch doctor --model embedded
    """
    from worker.config import Computation
    from worker.exactness.doctor import diagnose

    diagnosis = diagnose(Computation(**options))
    click.echo(diagnosis.model_dump_json(indent=2) if as_json else diagnosis.summary())
    if not diagnosis.agreement.agrees:
        click.get_current_context().exit(1)
