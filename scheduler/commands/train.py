"""`swiftbatch train`: target models and trained parts of engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from swiftbatch.scheduler.commands.options.option_types import MODEL, Amount, WholeNumber
from swiftbatch.worker.drafters.catalogue import HeadKind
from swiftbatch.worker.training import recipes
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, GriffinRecipe

Command = Callable[..., Any]
MAX_FEATURE_WEIGHT = 1000

DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="JSONL file with a field `text`, or a folder of them.",
)
PART_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="JSONL file with a field `text`, `messages` or `conversations`, or a folder of them.",
)
OUTPUT = click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write."
)
TOKENS = click.option(
    "--tokens",
    "num_tokens",
    type=WholeNumber(1),
    default=recipes.TARGET_TOKENS,
    help="Training tokens of the target, in windows. From 2 million on, long texts follow.",
)
SEED = click.option("--seed", type=WholeNumber(0), default=recipes.HeadRecipe.seed)
FEATURES = click.option(
    "--features",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the model's features, which trainings may share. [default: a folder in the output]",
)


def steps_option(default: int) -> Callable[[Command], Command]:
    return click.option("--steps", "num_steps", type=WholeNumber(1), default=default)


def own_texts_option(default: int) -> Callable[[Command], Command]:
    help_text = "Also learn from this many texts that the model generates."
    return click.option("--own-texts", "num_own_texts", type=WholeNumber(0), default=default, help=help_text)


def labels_option(default: recipes.Labels) -> Callable[[Command], Command]:
    help_text = "Learn the model's distributions, or as in the paper the text's next tokens."
    return click.option("--labels", type=click.Choice(get_args(recipes.Labels)), default=default, help=help_text)


def samples_option(default: int) -> Callable[[Command], Command]:
    help_text = "Samples of a step; GRIFFIN's paper has 4 per GPU."
    return click.option("--samples", "num_step_windows", type=WholeNumber(1), default=default, help=help_text)


@click.group()
def train() -> None:
    """Train models.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """


@train.command("all")
@DATA
@OUTPUT
@TOKENS
def everything(data: Path, output: Path, num_tokens: int) -> None:
    """Train a small target model and all trained parts, and write its model card, as for the embedded model.

    After a kill, the same command continues.

    \b
    Example:
      swiftbatch train all --data books --output my-model
    """
    from swiftbatch.worker.training.target_recipe import embedded_recipe
    from swiftbatch.worker.training.train_all import train_all

    train_all(data, output, embedded_recipe(num_tokens), click.echo)


@train.command()
@DATA
@OUTPUT
@TOKENS
@click.option(
    "--kind",
    type=click.Choice(recipes.TARGET_KINDS),
    default=recipes.TARGET_KIND,
    help="Kind of the model: the embedded one's, or a hybrid of as many parameters, with gated delta nets in three of "
    "four layers and the embedded model's tokenizer.",
)
def target(data: Path, output: Path, num_tokens: int, kind: str) -> None:
    """Train a small target model from scratch, as the embedded one was trained.

    After a kill, the same command continues.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """
    from swiftbatch.worker.training.target_recipe import embedded_recipe
    from swiftbatch.worker.training.train_target import train_target

    train_target(data, output, embedded_recipe(num_tokens), click.echo, kind)


@train.command()
@MODEL
@PART_DATA
@OUTPUT
@click.option(
    "--kind",
    type=click.Choice(get_args(HeadKind)),
    default=recipes.HeadRecipe.kind,
    help="Each head reads the head before it, or as in Medusa the model's hidden state.",
)
@click.option(
    "--heads",
    "num_heads",
    type=WholeNumber(1, recipes.MOST_HEADS),
    default=recipes.HeadRecipe.num_heads,
    help="Number of heads; a drafted tree is as deep.",
)
@steps_option(recipes.HeadRecipe.num_steps)
@click.option(
    "--rows",
    "num_step_rows",
    type=WholeNumber(1),
    default=recipes.HeadRecipe.num_step_rows,
    help="Tokens to learn from in a step, of all texts; the paper has 120 texts of up to 8192.",
)
@click.option(
    "--book-tokens",
    "num_book_tokens",
    type=WholeNumber(1),
    default=recipes.HeadRecipe.num_book_tokens,
    help="Tokens of a book, from its beginning.",
)
@click.option(
    "--own-texts",
    "num_own_texts",
    type=WholeNumber(0),
    default=recipes.HeadRecipe.num_own_texts,
    show_default=False,
    help="Learn from this many texts that the model generates.",
)
@FEATURES
@SEED
def tokenswift(model: str, data: Path, output: Path, features: Path | None, **options: Any) -> None:
    """Train a model's decoding heads for the engine `tokenswift`. The model itself is not changed.

    They learn from the beginnings of the books in *train*.jsonl, or with --own-texts from the model's continuations of
    parts of them. Accuracy is measured on *test*.jsonl. The embedded model's heads used --own-texts 512. After a kill,
    the same command continues.

    \b
    Example:
      swiftbatch train tokenswift --model my-model --data books --output my-model/parts
    """
    from swiftbatch.worker.training.data_parallel import joined
    from swiftbatch.worker.training.train_tokenswift import train_heads

    with joined(click.echo) as report:
        train_heads(model, data, output, recipes.HeadRecipe(**options), report, features)


@train.command()
@MODEL
@PART_DATA
@OUTPUT
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The config.json of a Llama, or its folder, for the shape; without it the embedded model's.",
)
@steps_option(recipes.DraftRecipe.num_steps)
@own_texts_option(recipes.DRAFT_TEXTS.num_own_texts)
@labels_option(recipes.DraftRecipe.labels)
@samples_option(recipes.DraftRecipe.num_step_windows)
@FEATURES
@SEED
def draft(model: str, data: Path, output: Path, config: Path | None, features: Path | None, **options: Any) -> None:
    """Train a small draft model for the engine `triforce`. The model itself is not changed.

    It learns the model's distributions on the books in *train*.jsonl and on the model's continuations of parts of them.
    *test*.jsonl measures how often both draw the same token. Engines find it without --draft-model in the folder
    `parts/draft` of the model's. After a kill, the same command continues.

    \b
    Example:
      swiftbatch train draft --model my-model --data books --output my-model/parts/draft
    """
    from swiftbatch.worker.training.data_parallel import joined
    from swiftbatch.worker.training.train_draft import read_shape, train_draft

    shape = None if config is None else read_shape(config)
    with joined(click.echo) as report:
        train_draft(model, data, output, recipes.draft_recipe(**options, shape=shape), report, features)


@train.command()
@MODEL
@PART_DATA
@OUTPUT
@steps_option(GRIFFIN_RECIPE.num_steps)
@own_texts_option(GRIFFIN_RECIPE.texts.num_own_texts)
@click.option(
    "--passes",
    "num_passes",
    type=WholeNumber(1),
    help=f"Forward passes of a draft to train on. [default: {GRIFFIN_RECIPE.num_passes}]",
)
@click.option(
    "--top-k",
    "align_top_k",
    type=WholeNumber(0),
    help=f"Top tokens of an earlier pass that count as aligned; 0: no mask. [default: {GRIFFIN_RECIPE.align_top_k}]",
)
@labels_option(GRIFFIN_RECIPE.labels)
@click.option(
    "--feature-weight",
    type=Amount("times", MAX_FEATURE_WEIGHT, min_open=False),
    default=GRIFFIN_RECIPE.feature_weight,
    help="Weight of the features' distance in the loss; 0: tokens alone.",
)
@click.option(
    "--warmup",
    "num_warmup_steps",
    type=WholeNumber(1),
    default=GRIFFIN_RECIPE.num_warmup_steps,
    help="Steps until the full learning rate; 2000 in the paper.",
)
@click.option(
    "--rows",
    "window_length",
    type=WholeNumber(2, GRIFFIN_RECIPE.texts.num_book_tokens),
    default=GRIFFIN_RECIPE.window_length,
    help="Most tokens of a sample; 2048 in the paper.",
)
@samples_option(GRIFFIN_RECIPE.num_step_windows)
@click.option("--no-token-alignment", is_flag=True, help="Use one pass and no mask, as in EAGLE-2.")
@click.option("--no-token-guided-fusion", is_flag=True, help="Fuse features and tokens once, as in EAGLE.")
@click.option("--no-token-enhanced-head", is_flag=True, help="Use one feature for tokens and for the next forward.")
@FEATURES
@SEED
def griffin(model: str, data: Path, output: Path, features: Path | None, **options: Any) -> None:
    """Train a model's draft model for the engine `griffin`. The model itself is not changed.

    It learns from the beginnings of the books in *train*.jsonl and from the model's continuations of parts of them. The
    accuracy of each forward pass of a draft is measured on *test*.jsonl. After a kill, the same command continues.
    Without alignment, fusion and head the recipe is EAGLE-2's; with --top-k 0 and without fusion and head, HASS's.

    \b
    Example:
      swiftbatch train griffin --model my-model --data books --output my-model/parts
    """
    from swiftbatch.worker.training.data_parallel import joined
    from swiftbatch.worker.training.train_griffin import train_griffin

    with joined(click.echo) as report:
        train_griffin(model, data, output, _griffin_recipe(**options), report, features)


@train.command()
@MODEL
@PART_DATA
@OUTPUT
@steps_option(recipes.MTPRecipe.num_steps)
@own_texts_option(recipes.MTPRecipe.texts.num_own_texts)
@FEATURES
@SEED
def mtp(
    model: str, data: Path, output: Path, num_steps: int, num_own_texts: int, features: Path | None, seed: int
) -> None:
    """Train a layer that predicts further tokens, with which `auto` drafts. The model itself is not changed.

    For models whose checkpoints have no such layer. It learns from the beginnings of the books in *train*.jsonl and
    from the model's continuations of parts of them; *test*.jsonl measures it. After a kill, the same command continues.

    \b
    Example:
      swiftbatch train mtp --model my-model --data books --output my-model/parts
    """
    from swiftbatch.worker.training.data_parallel import joined
    from swiftbatch.worker.training.train_mtp import train_mtp

    recipe = recipes.MTPRecipe(num_steps=num_steps, seed=seed)
    texts = replace(recipe.texts, num_own_texts=num_own_texts)
    with joined(click.echo) as report:
        train_mtp(model, data, output, replace(recipe, texts=texts), report, features)


@train.command("import")
@click.argument("kind", type=click.Choice(recipes.PUBLISHED_PARTS))
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@MODEL
@OUTPUT
def import_(kind: str, folder: Path, model: str, output: Path) -> None:
    """Convert a part that others trained for a model and published. The model itself is not changed.

    KIND is `eagle` for a layer of EAGLE, EAGLE-2 or HASS, `eagle3` for EAGLE-3's, `dflash` for the block drafters
    DFlash and DSpark, `griffin` for GRIFFIN's own (all four for the engine `griffin`), or `draft` for a small model
    with the same vocabulary (for `triforce`). TokenSwift's own heads are refused: they need a hidden state that no
    forward here hands out.

    \b
    Example:
      swiftbatch train import eagle3 EAGLE3-LLaMA3.1-Instruct-8B --model Llama-3.1-8B-Instruct --output parts
    """
    from swiftbatch.worker.training.import_parts import import_part

    import_part(kind, folder, model, output, click.echo)


def _griffin_recipe(
    num_own_texts: int,
    num_passes: int | None,
    align_top_k: int | None,
    no_token_alignment: bool,
    no_token_guided_fusion: bool,
    no_token_enhanced_head: bool,
    **fields: Any,
) -> GriffinRecipe:
    if no_token_alignment and not (num_passes is None and align_top_k is None):
        raise click.UsageError("--no-token-alignment means one pass and no mask; leave out --passes and --top-k")
    top_k = GRIFFIN_RECIPE.align_top_k if align_top_k is None else align_top_k or None
    return replace(
        GRIFFIN_RECIPE,
        num_passes=1 if no_token_alignment else num_passes or GRIFFIN_RECIPE.num_passes,
        align_top_k=None if no_token_alignment else top_k,
        fusion="none" if no_token_guided_fusion else GRIFFIN_RECIPE.fusion,
        has_token_enhanced_head=not no_token_enhanced_head,
        texts=replace(GRIFFIN_RECIPE.texts, num_own_texts=num_own_texts),
        **fields,
    )
