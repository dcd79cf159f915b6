"""The options that commands which measure share."""

from __future__ import annotations

from pathlib import Path

import click

JSON = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures."
)
PLOT = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="PNG file for the curves."
)
SEED = click.option("--seed", type=int, default=0, show_default=True)
