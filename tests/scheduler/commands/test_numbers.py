from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.commands.options.launch_options import CountOrAuto
from swiftbatch.scheduler.commands.options.option_types import InOurDigits
from swiftbatch.scheduler.driver.run_limits import Deadline
from tests.scheduler.commands.command_parts import COMMANDS

OF_CLICK = (click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))
OPTIONS = [
    (*path[1:], option.opts[0])
    for path, command in COMMANDS.items()
    for option in command.params
    if isinstance(option.type, (*OF_CLICK, Deadline, CountOrAuto))
]


def test_all_numbers_are_of_our_types() -> None:
    types = [option.type for command in COMMANDS.values() for option in command.params]
    assert not [each for each in types if isinstance(each, OF_CLICK) and not isinstance(each, InOurDigits)]
    assert len(OPTIONS) > 80


def test_help_shows_bounds_only_where_there_are_some() -> None:
    helps = [CliRunner().invoke(main, [*path[1:], "--help"]).stdout for path in COMMANDS]
    assert sum("x>=" in text for text in helps) > 5
    assert not [text for text in helps if "None" in text]


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_digits_of_other_scripts_are_refused(words: tuple[str, ...]) -> None:
    *command, option = words
    for digits in ("\u0663", "\uff13", "\u0967"):
        result = CliRunner().invoke(main, [*command, option, digits])
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.stderr
        assert "found" in result.stderr
        assert "expected" in result.stderr
        assert result.stderr.count("\n") == 1


def test_an_address_of_a_cluster_has_such_a_port() -> None:
    from swiftbatch.scheduler.cluster.ray_cluster import ClusterError, connect

    with (
        pytest.raises(ClusterError, match="expected HOST:PORT of a running Ray cluster"),
        connect("127.0.0.1:\u0668\u0660", 1),
    ):
        pass
