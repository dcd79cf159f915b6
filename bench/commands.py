"""`python -m bench`: its commands, one function each; those of papers and of whole runs have files of their own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import click

from bench.mixed import mixed
from bench.scale import scale
from bench.tail import tail
from swiftbatch.jobs import sampling_params
from swiftbatch.scheduler.cli import SETTINGS, OneLineErrors
from swiftbatch.scheduler.commands.bench import (
    CACHED_TEXT,
    MIN_P,
    POSITIONS,
    REPETITION_PENALTY,
    TEMPERATURE,
    decode,
    split,
)
from swiftbatch.scheduler.commands.options.model_options import (
    COMPUTING,
    CUDA_KERNELS,
    DRAFT_MODEL,
    DTYPE,
    JSON,
    MODEL,
    PLOT,
    SEED,
    THREADS,
    checked,
    say,
    show,
    text_of,
)
from swiftbatch.scheduler.commands.options.option_types import ANY_NUMBER, ANY_WHOLE_NUMBER, WholeNumber
from swiftbatch.worker.config import CheckpointSettings, Computation
from swiftbatch.worker.drafters.catalogue import ENGINES

NOT_PASSED = 1
PROGRAMS = {  # by the command's name: their modules, which are imported then alone
    "ablation": ("ablation_commands", "Measure what the parts of an engine bring: tables of papers."),
    "digests": ("digests", "Digests of all tokens, to compare before and behind a change."),
    "many-jobs": ("many_jobs", "Print the table of docs/gpu.md of few and of many jobs, planned as a worker plans."),
    "sizing": ("sizing", "Print the tables of docs/gpu.md of the memory that models need."),
    "speed-page": ("speed_page", "Write the figures of a folder into docs/speed.md."),
}
WITH_OPTIONS = ("ablation", "digests")  # programs that say themselves what they take
SINGLES = [name for name in ENGINES if name not in (Computation.engine, "autoregressive")]


NEEDED_TEXT = text_of("Text that fills the cache.", required=True)


def _program(name: str, module: str, words: str) -> click.Command:
    """A command that runs a module as a program."""

    def run(arguments: tuple[str, ...]) -> None:
        sys.argv = [module, *arguments]
        runpy.run_module(f"bench.{module}", run_name="__main__")

    settings = {"ignore_unknown_options": True, "help_option_names": [] if name in WITH_OPTIONS else ["--help"]}
    taken = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(name, settings, run, [taken], help=words)


@click.group(cls=OneLineErrors, context_settings=SETTINGS, invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Run a benchmark, or repeat a table of a paper.

    \b
    Example:
      python -m bench auto --positions 2048,16384 --slots 1,8 --text book.txt
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    elif context.invoked_subcommand == "decode":
        import bench.variants  # noqa: F401  then variants have names as engines do


@main.command()
@MODEL
@click.option("--engines", default=",".join(SINGLES), callback=split, help="Engines to compare with, comma-separated.")
@POSITIONS
@click.option(
    "--slots", "slot_counts", default="1,4,8", callback=split, help="Numbers of jobs in a step, comma-separated."
)
@click.option("--tokens", "num_tokens", default="256", callback=split, help="Tokens of each job, comma-separated.")
@click.option(
    "--repetitions", "num_repetitions", type=ANY_WHOLE_NUMBER, default=1, help="Repetitions, of which the worst counts."
)
@click.option("--temperatures", default="1.0", callback=split, help="Temperatures, comma-separated.")
@MIN_P
@SEED
@NEEDED_TEXT
@click.option("--kv-offload", type=click.Path(path_type=Path), metavar="DIR", help="Keep caches in this folder.")
@click.option(
    "--processor-time", is_flag=True, help="Count processor time: other programs add little to it. Needs --threads 1."
)
@JSON
@COMPUTING
def auto(**options: Any) -> None:
    """Compare the engine `auto` with plain decoding and the best single engine, at every point of a grid.

    All generate the same tokens in turn, at least 2,048 in every slot: short jobs follow each other, as on a worker.
    The time to start a job counts, and what an engine learns in one job helps it in the next.

    \b
    Example:
      python -m bench auto --positions 2048,16384 --slots 1,8 --temperatures 0.6,1.0 --text book.txt --json auto.json
    """
    from bench.auto import AutoBenchOptions, render, run_auto_bench

    show(render(run_auto_bench(checked(AutoBenchOptions, options), say)))


@main.command()
@MODEL
@click.option("--engine", default="autoregressive", help="Any engine; one without drafts shows a field's cost best.")
@click.option("--position", type=ANY_WHOLE_NUMBER, default=2048, help="Tokens in the cache.")
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=2000, help="Tokens to generate with each field.")
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=50, help="Rounds, of which the median counts.")
@click.option("--temperature", type=ANY_NUMBER, default=1.0)
@MIN_P
@SEED
@CACHED_TEXT
@JSON
@COMPUTING
def fields(**options: Any) -> None:
    """Time each field of a job line on one stream: penalties, biases, guards, log-probabilities, structures.

    All generate in turn, each its own text, and are compared with a line without any such field.

    \b
    Example:
      python -m bench fields --tokens 4000 --json fields.json
    """
    from bench.fields import FieldBenchOptions, render, run_field_bench

    show(render(run_field_bench(checked(FieldBenchOptions, options), say)))


@main.command()
@MODEL
@click.option(
    "--lengths", default="0,2048,20480,102400", callback=split, help="Positions in the cache, comma-separated."
)
@click.option("--rows", "row_counts", default="1,8,32", callback=split, help="Rows of a forward, comma-separated.")
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=7, help="Rounds, of which the median counts.")
@click.option(
    "--shapes",
    callback=split,
    help="Also time matrices in the shapes of: qwen3-0.6b, llama-3.1-8b.",
)
@DTYPE
@THREADS
@JSON
@PLOT
def kernels(**options: Any) -> None:
    """Time the compiled CPU kernels against this machine's limits, and whole forwards against transformers'.

    The same run measures the limits of memory and multiplications on as many threads. SWIFTBATCH_ISA selects another
    instruction set than the fastest.

    \b
    Example:
      python -m bench kernels --rows 1,8 --json kernels.json --plot kernels.png
    """
    from bench.kernels import KernelBenchOptions, render, run_kernel_bench

    show(render(run_kernel_bench(checked(KernelBenchOptions, options), say)))


@main.command()
@MODEL
@click.option(
    "--caches", default="scan:256,summary:2048", callback=split, help="Caches as name:budget, comma-separated."
)
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to draw at each position.")
@click.option("--temperatures", default="1.0", callback=split, help="Temperatures, comma-separated.")
@MIN_P
@SEED
@NEEDED_TEXT
@JSON
@COMPUTING
def agreement(**options: Any) -> None:
    """Count how often the model draws the same token with a partial cache as with all keys.

    \b
    Example:
      python -m bench agreement --caches scan:256,streaming:512 --positions 16384 --text book.txt --json agreement.json
    """
    from bench.agreement import AgreementOptions, render, run_agreement_bench

    show(render(run_agreement_bench(checked(AgreementOptions, options), say)))


@main.command()
@MODEL
@click.option("--engine", default=Computation.engine)
@POSITIONS
@click.option(
    "--checkpoint-tokens",
    type=ANY_WHOLE_NUMBER,
    default=CheckpointSettings.checkpoint_tokens,
    help="Tokens between two checkpoints.",
)
@click.option(
    "--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=5, help="Intervals measured with state and without."
)
@NEEDED_TEXT
@JSON
@COMPUTING
def checkpoints(**options: Any) -> None:
    """Measure what writing state costs while a job runs, and what it saves when the job is resumed.

    \b
    Example:
      python -m bench checkpoints --positions 4096,60000 --text book.txt --json checkpoints.json
    """
    from bench.checkpoints import CheckpointBenchOptions, render, run_checkpoint_bench

    show(render(run_checkpoint_bench(checked(CheckpointBenchOptions, options), say)))


@main.command()
@MODEL
@DRAFT_MODEL
@click.option("--engine", default=Computation.engine)
@click.option("--tokens", "max_tokens", type=ANY_WHOLE_NUMBER, default=100_000, help="Tokens to generate.")
@click.option("--prefill", type=ANY_WHOLE_NUMBER, default=4096, help="Tokens of the prompt.")
@click.option("--every", type=ANY_WHOLE_NUMBER, default=20_000, help="Tokens between two records.")
@click.option(
    "--plain-every", type=ANY_WHOLE_NUMBER, default=2500, help="Tokens between two measurements of plain decoding."
)
@TEMPERATURE
@click.option("--top-p", type=ANY_NUMBER, default=sampling_params.TOP_P)
@MIN_P
@click.option("--eta", type=ANY_NUMBER, default=sampling_params.ETA)
@REPETITION_PENALTY
@click.option("--penalty-window", type=ANY_WHOLE_NUMBER, default=sampling_params.PENALTY_WINDOW)
@SEED
@text_of("Text of the prompt. [default: the model's own]")
@JSON
@PLOT
@COMPUTING
def long(**options: Any) -> None:
    """Generate one long text, and compare with plain decoding at the same positions.

    Alpha is the accepted tokens divided by the depth of the drafts. JSON and plot are written at every record.

    \b
    Example:
      python -m bench long --engine tokenswift --tokens 100000 --prefill 4096 --json long.json --plot long.png
    """
    from bench.long import LongBenchOptions, run_long_bench
    from bench.long_figures import render
    from swiftbatch.jobs.sampling_params import SamplingParams

    drawn_with = {name: options.pop(name) for name in SamplingParams.model_fields.keys() & options.keys()}
    bench_options = checked(LongBenchOptions, options | {"sampling": drawn_with | {"ignore_eos": True}})
    show(render(run_long_bench(bench_options, say)))


@main.command()
@MODEL
@DRAFT_MODEL
@click.option("--engines", default=",".join(ENGINES), callback=split, help="Engines, comma-separated.")
@click.option(
    "--lengths", default="1000,20000,50000,100000", callback=split, help="Positions in the caches, as far as they fit."
)
@click.option(
    "--slots", "slot_counts", default="1,4", callback=split, help="Numbers of sequences in a step, comma-separated."
)
@click.option("--rows", "row_counts", default="1,16", callback=split, help="Rows of each sequence, comma-separated.")
@click.option("--read", "num_read", type=ANY_WHOLE_NUMBER, default=4096, help="Tokens of a prompt, after each length.")
@click.option(
    "--tokens",
    "num_tokens",
    type=ANY_WHOLE_NUMBER,
    default=256,
    help="Tokens to generate at each length with each engine.",
)
@CACHED_TEXT
@DTYPE
@CUDA_KERNELS
@JSON
@click.option("--everything", "is_everything", is_flag=True, help="Run all checks and measurements, stage by stage.")
@click.option("--minutes", type=WholeNumber(1), default=27, help="With --everything: time for all stages together.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), help="With --everything: folder for what is found."
)
def gpu(is_everything: bool, minutes: int, output: Path | None, **options: Any) -> None:
    """Measure a GPU: steps against the roofline, prefill, a resume, every engine, and the memory used.

    Run `swiftbatch doctor --device cuda` first. Without --text the model generates its own, which takes minutes.

    With --everything it brings its own models, and needs neither Ray nor a network. Every stage has a process of its
    own, which is killed when its time is over, and leaves a JSON file and a log in the folder; `summary.md` has all
    tables. The same command goes on after an interruption. Exit code: 0 all stages passed, 1 not all did.

    \b
    Example:
      python -m bench gpu --model DIR --text book.txt --json gpu.json
      python -m bench gpu --everything --minutes 27 --output found
    """
    if is_everything != (output is not None):
        raise click.UsageError("--everything and --output DIR go together: a folder for what its stages find")
    if output is not None:
        _everything_on_a_gpu(output, minutes)
        return
    from bench.gpu.gpu import run_gpu_bench
    from bench.gpu.gpu_figures import GPUBenchOptions, render

    show(render(run_gpu_bench(checked(GPUBenchOptions, options), say)))


def _everything_on_a_gpu(output: Path, minutes: int) -> None:
    from bench.gpu.everything import EverythingOptions, run_everything
    from bench.gpu.everything_page import PAGE

    has_passed = run_everything(EverythingOptions(output, minutes), say)
    click.echo(f"tables: {output / PAGE}")
    if not has_passed:
        click.get_current_context().exit(NOT_PASSED)


@main.command("all")
@MODEL
@NEEDED_TEXT
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for figures and page."
)
@click.option("--small", "is_small", is_flag=True, help="A few tokens of everything, to see whether it runs here.")
@DTYPE
@THREADS
def everything(**options: Any) -> None:
    """Run the other benchmarks one after the other, and write their tables to one page.

    With the embedded model on two cores it takes about 25 minutes. The text must have 100,000 tokens. Every stage
    leaves a JSON file in the folder. The same command goes on after an interruption, and runs only what is missing.

    \b
    Example:
      python -m bench all --text book.txt --output figures
    """
    from bench.speed_page import PAGE
    from bench.suite import SuiteOptions, run_suite
    from swiftbatch.scheduler.cluster.worker_code import own_code

    suite = checked(SuiteOptions, options)
    try:
        run_suite(suite, own_code(is_sent=False).digest, say)
    except KeyboardInterrupt:
        hint = f"`python -m bench all` with the same options goes on from what is in {suite.output}"
        raise KeyboardInterrupt(hint) from None
    click.echo(f"tables: {suite.output / PAGE}")


for command in (decode, mixed, scale, tail):
    main.add_command(command)
for name, (module, words) in PROGRAMS.items():
    main.add_command(_program(name, module, words))
