"""Commands that repeat the tables of papers: what the parts of an engine bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from bench.griffin_tables import GRIFFIN_TABLES, NUM_ORDER_SEEDS
from bench.tokenswift_tables import ABLATIONS, Engine
from bench.triforce_tables import PROMPT_TABLES
from swiftbatch.scheduler.cli import SETTINGS, OneLineErrors
from swiftbatch.scheduler.commands.options.model_options import (
    COMPUTING,
    DRAFT_MODEL,
    JSON,
    MODEL,
    SEED,
    checked,
    say,
    show,
    text_of,
)
from swiftbatch.scheduler.commands.options.option_types import ANY_WHOLE_NUMBER


@click.group(cls=OneLineErrors, context_settings=SETTINGS)
def ablation() -> None:
    """Measure what the parts of an engine bring.

    \b
    Example:
      python -m bench ablation tokenswift --table 5
    """


@ablation.command()
@MODEL
@DRAFT_MODEL
@click.option(
    "--table", type=click.Choice(list(ABLATIONS)), required=True, help="Table of the paper. 15 also gives 16."
)
@click.option(
    "--engine",
    type=click.Choice(get_args(Engine)),
    default=get_args(Engine)[0],
    help="Baseline of the arms: K = 1 and whole trees, or as many rounds and nodes as pay.",
)
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=20_000, help="Tokens to generate with each arm.")
@SEED
@text_of("Text of the prompt. [default: the model's own]")
@JSON
@COMPUTING
def tokenswift(**options: Any) -> None:
    """Repeat an ablation of the TokenSwift paper. Its five lengths are fifths of `--tokens`.

    \b
    Example:
      python -m bench ablation tokenswift --table 5 --tokens 20000 --json table5.json
    """
    from bench.tokenswift_ablation import AblationOptions, run_ablation

    show(run_ablation(checked(AblationOptions, options), say))


@ablation.command()
@MODEL
@DRAFT_MODEL
@click.option("--table", type=click.Choice(list(PROMPT_TABLES)), required=True, help="Table or figure of the paper.")
@click.option("--prefill", type=ANY_WHOLE_NUMBER, default=32_768, help="Tokens of the prompt.")
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to generate with each arm.")
@SEED
@text_of("Whole books for the prompts.", required=True)
@click.option(
    "--kv-offload", type=click.Path(path_type=Path), metavar="DIR", help="Table 3: keep caches in this folder."
)
@JSON
@COMPUTING
def triforce(**options: Any) -> None:
    """Repeat a table or figure of the TriForce paper, with prompts of `--prefill` tokens (table 4: in all).

    Every arm continues the same prompt, as plain decoding does, and must give the same tokens.

    \b
    Example:
      python -m bench ablation triforce --table 2 --prefill 100000 --text books.jsonl --json table2.json
    """
    from bench.triforce_ablation import PromptAblationOptions, run_prompt_ablation

    show(run_prompt_ablation(checked(PromptAblationOptions, options), say))


@ablation.command()
@MODEL
@click.option("--table", type=click.Choice(list(GRIFFIN_TABLES)), required=True, help="Table of the paper, or order.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Books to train on.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for trainings.")
@click.option(
    "--steps", "num_steps", type=ANY_WHOLE_NUMBER, help="Steps of each training. [default: as `train griffin`]"
)
@click.option(
    "--own-texts",
    "num_own_texts",
    type=ANY_WHOLE_NUMBER,
    help="Generated texts to learn from. [default: as `train griffin`]",
)
@click.option(
    "--seeds",
    "num_seeds",
    type=ANY_WHOLE_NUMBER,
    help=f"Trainings per row of table order. [default: {NUM_ORDER_SEEDS}]",
)
@SEED
@text_of("Books for the prompts, unseen in training.")
@click.option("--prompts", "num_prompts", type=ANY_WHOLE_NUMBER, default=2, help="Number of prompts.")
@click.option("--prefill", type=ANY_WHOLE_NUMBER, default=2048, help="Tokens of each prompt.")
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to generate for each prompt.")
@JSON
@COMPUTING
def griffin(**options: Any) -> None:
    """Repeat a table or figure of the GRIFFIN paper: train what its rows compare, then let them draft.

    Trainings are kept in --work, one folder each, for other tables and after a kill. Every arm continues the same
    prompts, as plain decoding does, and must give the same tokens.

    \b
    Example:
      python -m bench ablation griffin --table 2 --data books --text test.jsonl --work griffin --json table2.json
    """
    from bench.griffin_ablation import GriffinAblationOptions, run_griffin_ablation

    given = {name: value for name, value in options.items() if value is not None}
    show(run_griffin_ablation(checked(GriffinAblationOptions, given), say))


if __name__ == "__main__":
    ablation(prog_name="python -m bench ablation")
