"""The commands of `python -m bench`: each has help with an example, and defaults that stand once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from bench import suite
from bench.ablation_commands import ablation
from bench.agreement import AgreementOptions
from bench.auto import AutoBenchOptions
from bench.checkpoints import CheckpointBenchOptions
from bench.commands import PROGRAMS, WITH_OPTIONS, main
from bench.fields import FieldBenchOptions
from bench.gpu.gpu_figures import GPUBenchOptions
from bench.griffin_ablation import GriffinAblationOptions
from bench.kernels import KernelBenchOptions
from bench.long import LongBenchOptions
from bench.mixed import MixedOptions
from bench.scale import ScaleOptions
from bench.suite import SuiteOptions
from bench.tail import TailOptions
from bench.tokenswift_ablation import AblationOptions
from bench.triforce_ablation import PromptAblationOptions
from swiftbatch.worker.decode_bench import DecodeBenchOptions
from tests import ROOT
from tests.readme.command_lines import PAGES, commands, options, page
from tests.scheduler.commands.test_defaults import defaults

FIELDS = {
    "decode": defaults(DecodeBenchOptions),
    "auto": defaults(AutoBenchOptions),
    "fields": defaults(FieldBenchOptions),
    "kernels": defaults(KernelBenchOptions),
    "agreement": defaults(AgreementOptions),
    "checkpoints": defaults(CheckpointBenchOptions),
    "long": defaults(LongBenchOptions),
    "all": defaults(SuiteOptions),
    "gpu": defaults(GPUBenchOptions),
    "scale": defaults(ScaleOptions),
    "mixed": defaults(MixedOptions),
    "tail": defaults(TailOptions),
    "tokenswift": defaults(AblationOptions),
    "triforce": defaults(PromptAblationOptions),
    "griffin": defaults(GriffinAblationOptions),
}
COMMANDS = {name: command for name, command in (main.commands | ablation.commands).items() if name not in PROGRAMS}

BENCH = re.compile(r"python -m bench ([a-z].*)")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def test_all_benchmarks_are_there() -> None:
    assert COMMANDS.keys() == FIELDS.keys()
    assert main.commands.keys() == COMMANDS.keys() - ablation.commands.keys() | PROGRAMS.keys()
    listed = subprocess.run([sys.executable, "-m", "bench"], cwd=ROOT, capture_output=True, text=True)
    assert [line.split()[0] for line in listed.stdout.partition("Commands:\n")[2].splitlines()] == sorted(main.commands)


@pytest.mark.parametrize("name", FIELDS)
def test_every_benchmark_has_help_with_an_example_and_defaults_of_its_fields(name: str) -> None:
    command, fields = COMMANDS[name], FIELDS[name]
    example = (command.help or "").partition("Example:\n")[2].strip().splitlines()[0].split()
    assert name in example
    context = click.Context(command)
    command.make_parser(context).parse_args(example[example.index(name) + 1 :])  # its options exist
    given = {option.name: option.get_default(context) for option in command.params if option.name in fields}
    own = {field: default for field, default in given.items() if isinstance(default, str | int | float)}
    assert own == {field: fields[field] for field in own}


def test_every_benchmark_that_a_page_shows_is_one_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [words for path in PAGES for words in commands(page(path), BENCH)]
    (tmp_path / "vllm/bin").mkdir(parents=True)
    for name in ("book.txt", "vllm/bin/python"):
        (tmp_path / name).touch()
    for name in ("DIR", "WORK", "MODEL"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for words in shown:
        if words[0] == "ablation":
            assert options(words[1:], ablation)
        else:
            assert words[1:] == [] or options(words, main)
    assert {words[0] for words in shown} >= main.commands.keys() - {"digests"}


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for args, problem in (
        (["all", "--output", "O"], "Missing option '--text'"),
        (["all", "--text", "/dev/null", "--output", "/proc/figures"], "/proc/figures"),
        (["decode", "--engines", "warp"], "expected some of"),
    ):
        result = invoke(*args)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert problem in result.stderr


def test_an_interrupted_bench_all_tells_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "text_tokens", interrupt)
    (tmp_path / "book.txt").write_text("Once")
    result = invoke("all", "--text", str(tmp_path / "book.txt"), "--output", str(tmp_path / "figures"))
    assert result.exit_code == 130
    hint = "`python -m bench all` with the same options goes on from what is in"
    assert result.stderr.strip() == f"interrupted; {hint} {tmp_path / 'figures'}"


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(WITH_OPTIONS)))
def test_a_program_without_options_says_what_it_does_and_does_it_not(name: str) -> None:
    told = CliRunner().invoke(main, [name, "--help"])
    assert told.exit_code == 0
    assert f"Usage: main {name}" in told.output
