"""Each default has one source, the option's field if it has one."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest
from pydantic import BaseModel

from swiftbatch.scheduler.chaos.chaos_options import ChaosOptions
from swiftbatch.scheduler.driver.run_limits import Limits
from swiftbatch.scheduler.runs.run_settings import ServeOptions, Settings
from swiftbatch.worker.config import CheckpointSettings, Computation
from swiftbatch.worker.decode_bench import DecodeBenchOptions
from swiftbatch.worker.drafters import triforce
from swiftbatch.worker.drafters.griffin import draft_input
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, DraftRecipe, GriffinRecipe, HeadRecipe, MTPRecipe
from tests.scheduler.commands.command_parts import LEAVES


def defaults(*models: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in models:
        if issubclass(model, BaseModel):
            found |= {name: field.default for name, field in model.model_fields.items() if not field.is_required()}
        else:
            fields = dataclasses.fields(model)
            found |= {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return found


LAUNCH = defaults(Computation, CheckpointSettings, Settings, Limits)
FIELDS = {
    "submit": LAUNCH,
    "nightly": LAUNCH,
    "serve": LAUNCH | defaults(ServeOptions),
    "resume": LAUNCH,
    "extend": LAUNCH,
    "fork": LAUNCH,
    "score": defaults(Computation),
    "doctor": defaults(Computation),
    "chaos": defaults(ChaosOptions),
    "bench decode": defaults(DecodeBenchOptions),
    "train tokenswift": defaults(HeadRecipe),
    "train draft": defaults(DraftRecipe),
    "train griffin": defaults(GriffinRecipe) | {"num_own_texts": GRIFFIN_RECIPE.texts.num_own_texts},
    "train mtp": defaults(MTPRecipe) | {"num_own_texts": MTPRecipe().texts.num_own_texts},
}
WITHOUT = {  # they set no field
    *("status", "tail", "results", "report", "verify", "cancel", "prune", "inspect", "quantize"),
    *("train all", "train import", "train target", "serve usage"),
}


def test_all_commands_are_there() -> None:
    assert LEAVES.keys() == FIELDS.keys() | WITHOUT


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_has_the_default_of_the_field_that_it_sets(name: str) -> None:
    command, fields = LEAVES[name], FIELDS[name]
    context = click.Context(command)
    given = {option.name: option.get_default(context) for option in command.params if option.name in fields}
    own = {field: default for field, default in given.items() if isinstance(default, str | int | float)}
    assert own == {field: fields[field] for field in own}


@pytest.mark.parametrize("name", ["submit", "resume", "train griffin"])
def test_a_default_that_a_help_text_names_is_that_of_the_field(name: str) -> None:
    texts = {option.name: option.help or "" for option in LEAVES[name].params if isinstance(option, click.Option)}
    named = {field: text.partition("[default: ")[2].removesuffix("]") for field, text in texts.items()}
    values = {field: value for field, value in named.items() if value and " " not in value and field in FIELDS[name]}
    assert values == {field: str(FIELDS[name][field]) for field in values}


def test_windows_of_draft_models_are_as_long_as_what_they_read_when_they_draft() -> None:
    assert DraftRecipe.window_length == triforce.NUM_SINKS + 2 * triforce.WINDOW
    assert GriffinRecipe.window_length == draft_input.NUM_ENTRIES
