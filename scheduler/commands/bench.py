"""The command `bench`: its benchmarks, one function each; ablations have a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swiftbatch.jobs import sampling
from swiftbatch.scheduler.commands.ablation import ablation
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
from swiftbatch.scheduler.commands.run_benches import mixed, scale, tail
from swiftbatch.worker.config import CheckpointSettings, Computation
from swiftbatch.worker.drafters.catalogue import ENGINES

NOT_PASSED = 1
SINGLES = [name for name in ENGINES if name not in (Computation.engine, "autoregressive")]


def _split(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


TEMPERATURE = click.option("--temperature", type=ANY_NUMBER, default=0.0)
MIN_P = click.option("--min-p", type=ANY_NUMBER, default=0.1)
REPETITION_PENALTY = click.option("--repetition-penalty", type=ANY_NUMBER, default=sampling.REPETITION_PENALTY)
CACHED_TEXT = text_of("Text that fills the cache. [default: the model's own]")
NEEDED_TEXT = text_of("Text that fills the cache.", required=True)
POSITIONS = click.option(
    "--positions", default="4096", callback=_split, help="Numbers of tokens in the cache, comma-separated."
)


@click.group()
def bench() -> None:
    """Measure speed.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096
    """


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option(
    "--engines", default=f"autoregressive,{Computation.engine}", callback=_split, help="Engines, comma-separated."
)
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to generate at each position.")
@TEMPERATURE
@MIN_P
@REPETITION_PENALTY
@SEED
@CACHED_TEXT
@JSON
@click.option("--against", type=click.Choice(["transformers"]), help="Also time this implementation.")
@COMPUTING
def decode(**options: Any) -> None:
    """Compare engines: each generates the same tokens from the same state.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096,100000 --tokens 256 --json bench.json
    """
    from swiftbatch.worker.bench.decode import DecodeBenchOptions, run_decode_bench
    from swiftbatch.worker.bench.decode_figures import render

    show(render(run_decode_bench(checked(DecodeBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option("--engines", default=",".join(SINGLES), callback=_split, help="Engines to compare with, comma-separated.")
@POSITIONS
@click.option(
    "--slots", "slot_counts", default="1,4,8", callback=_split, help="Numbers of jobs in a step, comma-separated."
)
@click.option("--tokens", "num_tokens", default="256", callback=_split, help="Tokens of each job, comma-separated.")
@click.option(
    "--repetitions", "num_repetitions", type=ANY_WHOLE_NUMBER, default=1, help="Repetitions, of which the worst counts."
)
@click.option("--temperatures", default="1.0", callback=_split, help="Temperatures, comma-separated.")
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
      swiftbatch bench auto --positions 2048,16384 --slots 1,8 --temperatures 0.6,1.0 --text book.txt --json auto.json
    """
    from swiftbatch.worker.bench.auto_bench import AutoBenchOptions, run_auto_bench
    from swiftbatch.worker.bench.auto_figures import render

    show(render(run_auto_bench(checked(AutoBenchOptions, options), say)))


@bench.command()
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
      swiftbatch bench fields --tokens 4000 --json fields.json
    """
    from swiftbatch.worker.bench.fields import FieldBenchOptions, render, run_field_bench

    show(render(run_field_bench(checked(FieldBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option(
    "--lengths", default="0,2048,20480,102400", callback=_split, help="Positions in the cache, comma-separated."
)
@click.option("--rows", "row_counts", default="1,8,32", callback=_split, help="Rows of a forward, comma-separated.")
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=7, help="Rounds, of which the median counts.")
@click.option(
    "--shapes",
    callback=_split,
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
      swiftbatch bench kernels --rows 1,8 --json kernels.json --plot kernels.png
    """
    from swiftbatch.worker.bench.kernels.kernel_figures import render
    from swiftbatch.worker.bench.kernels.kernels import KernelBenchOptions, run_kernel_bench

    show(render(run_kernel_bench(checked(KernelBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option(
    "--caches", default="scan:256,summary:2048", callback=_split, help="Caches as name:budget, comma-separated."
)
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to draw at each position.")
@click.option("--temperatures", default="1.0", callback=_split, help="Temperatures, comma-separated.")
@MIN_P
@SEED
@NEEDED_TEXT
@JSON
@COMPUTING
def agreement(**options: Any) -> None:
    """Count how often the model draws the same token with a partial cache as with all keys.

    \b
    Example:
      swiftbatch bench agreement --caches scan:256,streaming:512 --positions 16384 --text book.txt --json agreement.json
    """
    from swiftbatch.worker.bench.agreement import AgreementOptions, render, run_agreement_bench

    show(render(run_agreement_bench(checked(AgreementOptions, options), say)))


@bench.command()
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
      swiftbatch bench checkpoints --positions 4096,60000 --text book.txt --json checkpoints.json
    """
    from swiftbatch.worker.bench.checkpoints import CheckpointBenchOptions, render, run_checkpoint_bench

    show(render(run_checkpoint_bench(checked(CheckpointBenchOptions, options), say)))


@bench.command()
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
@click.option("--top-p", type=ANY_NUMBER, default=sampling.TOP_P)
@MIN_P
@click.option("--eta", type=ANY_NUMBER, default=sampling.ETA)
@REPETITION_PENALTY
@click.option("--penalty-window", type=ANY_WHOLE_NUMBER, default=sampling.PENALTY_WINDOW)
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
      swiftbatch bench long --engine tokenswift --tokens 100000 --prefill 4096 --json long.json --plot long.png
    """
    from swiftbatch.jobs.sampling import SamplingParams
    from swiftbatch.worker.bench.long.long import LongBenchOptions, run_long_bench
    from swiftbatch.worker.bench.long.long_figures import render

    drawn_with = {name: options.pop(name) for name in SamplingParams.model_fields.keys() & options.keys()}
    bench_options = checked(LongBenchOptions, options | {"sampling": drawn_with | {"ignore_eos": True}})
    show(render(run_long_bench(bench_options, say)))


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option("--engines", default=",".join(ENGINES), callback=_split, help="Engines, comma-separated.")
@click.option(
    "--lengths", default="1000,20000,50000,100000", callback=_split, help="Positions in the caches, as far as they fit."
)
@click.option(
    "--slots", "slot_counts", default="1,4", callback=_split, help="Numbers of sequences in a step, comma-separated."
)
@click.option("--rows", "row_counts", default="1,16", callback=_split, help="Rows of each sequence, comma-separated.")
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
      swiftbatch bench gpu --model DIR --text book.txt --json gpu.json
      swiftbatch bench gpu --everything --minutes 27 --output found
    """
    if is_everything != (output is not None):
        raise click.UsageError("--everything and --output DIR go together: a folder for what its stages find")
    if output is not None:
        _everything_on_a_gpu(output, minutes)
        return
    from swiftbatch.worker.bench.gpu.gpu import run_gpu_bench
    from swiftbatch.worker.bench.gpu.gpu_figures import GPUBenchOptions, render

    show(render(run_gpu_bench(checked(GPUBenchOptions, options), say)))


def _everything_on_a_gpu(output: Path, minutes: int) -> None:
    from swiftbatch.worker.bench.gpu.everything.everything import EverythingOptions, run_everything
    from swiftbatch.worker.bench.gpu.everything.everything_page import PAGE

    has_passed = run_everything(EverythingOptions(output, minutes), say)
    click.echo(f"tables: {output / PAGE}")
    if not has_passed:
        click.get_current_context().exit(NOT_PASSED)


@bench.command("all")
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
      swiftbatch bench all --text book.txt --output figures
    """
    from swiftbatch.scheduler.cluster.bootstrap import own_code
    from swiftbatch.worker.bench.suite.speed_page import PAGE
    from swiftbatch.worker.bench.suite.suite import SuiteOptions, run_suite

    suite = checked(SuiteOptions, options)
    try:
        run_suite(suite, own_code(is_sent=False).digest, say)
    except KeyboardInterrupt:
        hint = f"`swiftbatch bench all` with the same options goes on from what is in {suite.output}"
        raise KeyboardInterrupt(hint) from None
    click.echo(f"tables: {suite.output / PAGE}")


for command in (ablation, mixed, scale, tail):
    bench.add_command(command)
