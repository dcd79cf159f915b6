"""The command `bench`: its benchmarks, one function each; ablations have a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swiftbatch.jobs import sampling_defaults
from swiftbatch.scheduler.commands.ablation import ablation
from swiftbatch.scheduler.commands.model_options import (
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
)
from swiftbatch.scheduler.commands.options.numbers import ANY_NUMBER, ANY_WHOLE_NUMBER
from swiftbatch.worker.config import CheckpointSettings, Computation
from swiftbatch.worker.drafters.catalogue import ENGINES

SINGLES = [name for name in ENGINES if name not in (Computation.engine, "autoregressive")]


def _split(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


TEMPERATURE = click.option("--temperature", type=ANY_NUMBER, default=0.0)
MIN_P = click.option("--min-p", type=ANY_NUMBER, default=0.1)
REPETITION_PENALTY = click.option("--repetition-penalty", type=ANY_NUMBER, default=sampling_defaults.REPETITION_PENALTY)
POSITIONS = click.option("--positions", default="4096", callback=_split, help="Tokens in the cache, comma-separated.")


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
    "--engines", default=f"autoregressive,{Computation.engine}", callback=_split, help="Names, comma-separated."
)
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="To generate at each position.")
@TEMPERATURE
@MIN_P
@REPETITION_PENALTY
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What fills the cache. [default: own text]")
@JSON
@click.option("--against", type=click.Choice(["transformers"]), help="Also time this implementation.")
@COMPUTING
def decode(**options: Any) -> None:
    """Let every engine generate the same tokens from the same state, and compare.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096,100000 --tokens 256 --json bench.json
    """
    from swiftbatch.worker.bench.decode.decode import DecodeBenchOptions, run_decode_bench
    from swiftbatch.worker.bench.decode.records import render

    show(render(run_decode_bench(checked(DecodeBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option("--engines", default=",".join(SINGLES), callback=_split, help="To compare with, comma-separated.")
@POSITIONS
@click.option("--slots", "slot_counts", default="1,4,8", callback=_split, help="Jobs of a step, comma-separated.")
@click.option("--tokens", "num_tokens", default="256", callback=_split, help="Of each job, comma-separated.")
@click.option("--repetitions", "num_repetitions", type=ANY_WHOLE_NUMBER, default=1, help="The worst one counts.")
@click.option("--temperatures", default="1.0", callback=_split, help="Comma-separated.")
@MIN_P
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="What fills the cache.")
@click.option("--kv-offload", type=click.Path(path_type=Path), metavar="DIR", help="Keep caches there.")
@JSON
@COMPUTING
def auto(**options: Any) -> None:
    """Compare the engine that chooses with plain decoding and the best single engine, at every place of a grid.

    All generate the same tokens in turn, 2,048 of every slot at least: short jobs follow each other, as on a worker.
    What an engine takes to get ready for a job counts, and what it learns in one helps it in the next.

    \b
    Example:
      swiftbatch bench auto --positions 2048,16384 --slots 1,8 --temperatures 0.6,1.0 --text book.txt --json auto.json
    """
    from swiftbatch.worker.bench.auto.auto_bench import AutoBenchOptions, run_auto_bench
    from swiftbatch.worker.bench.auto.records import render

    show(render(run_auto_bench(checked(AutoBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option("--engine", default="autoregressive", help="Any; without drafts a field's own cost is seen best.")
@click.option("--position", type=ANY_WHOLE_NUMBER, default=2048, help="Tokens in the cache.")
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=2000, help="To generate with each field.")
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=50, help="Of which the median counts.")
@click.option("--temperature", type=ANY_NUMBER, default=1.0)
@MIN_P
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What fills the cache. [default: own text]")
@JSON
@COMPUTING
def fields(**options: Any) -> None:
    """Time what each field of a job line costs on one stream: penalties, biases, guards, log-probabilities, structures.

    All generate in turn, each its own text, beside one whose line says nothing.

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
@click.option("--rows", "row_counts", default="1,8,32", callback=_split, help="In a forward, comma-separated.")
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=7, help="Of which the median counts.")
@DTYPE
@THREADS
@JSON
@PLOT
def kernels(**options: Any) -> None:
    """Time the compiled CPU kernels beside what this machine allows, and whole forwards beside transformers'.

    Memory and multiplications are measured in the same run, on as many threads. SWIFTBATCH_ISA names another
    instruction set than the fastest.

    \b
    Example:
      swiftbatch bench kernels --rows 1,8 --json kernels.json --plot kernels.png
    """
    from swiftbatch.worker.bench.kernels.kernels import KernelBenchOptions, run_kernel_bench
    from swiftbatch.worker.bench.kernels.records import render

    show(render(run_kernel_bench(checked(KernelBenchOptions, options), say)))


@bench.command()
@MODEL
@click.option("--caches", default="scan:256,summary:2048", callback=_split, help="name:budget, comma-separated.")
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="To draw at each position.")
@click.option("--temperatures", default="1.0", callback=_split, help="Comma-separated.")
@MIN_P
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="What fills the cache.")
@JSON
@COMPUTING
def agreement(**options: Any) -> None:
    """Count how often the model draws with a partial cache what it draws with all keys.

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
    help="Tokens between two states.",
)
@click.option("--rounds", "num_rounds", type=ANY_WHOLE_NUMBER, default=5, help="Intervals measured each way.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="What fills the cache.")
@JSON
@COMPUTING
def checkpoints(**options: Any) -> None:
    """Measure what writing state costs while a job runs, and what it saves when the job is resumed.

    \b
    Example:
      swiftbatch bench checkpoints --positions 4096,60000 --text book.txt --json checkpoints.json
    """
    from swiftbatch.worker.bench.checkpoints.checkpoints import CheckpointBenchOptions, render, run_checkpoint_bench

    show(render(run_checkpoint_bench(checked(CheckpointBenchOptions, options), say)))


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option("--engine", default=Computation.engine)
@click.option("--tokens", "max_tokens", type=ANY_WHOLE_NUMBER, default=100_000, help="To generate.")
@click.option("--prefill", type=ANY_WHOLE_NUMBER, default=4096, help="Tokens of text to go on from.")
@click.option("--every", type=ANY_WHOLE_NUMBER, default=20_000, help="Tokens between two records.")
@click.option("--plain-every", type=ANY_WHOLE_NUMBER, default=2500, help="Tokens between two looks at plain decoding.")
@TEMPERATURE
@click.option("--top-p", type=ANY_NUMBER, default=sampling_defaults.TOP_P)
@MIN_P
@click.option("--eta", type=ANY_NUMBER, default=sampling_defaults.ETA)
@REPETITION_PENALTY
@click.option("--penalty-window", type=ANY_WHOLE_NUMBER, default=sampling_defaults.PENALTY_WINDOW)
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What is read first. [default: own text]")
@JSON
@PLOT
@COMPUTING
def long(**options: Any) -> None:
    """Generate one long text, and compare with plain decoding at the same positions on the way.

    Alpha is accepted tokens over the depth of what was drafted. JSON and plot are written at every record.

    \b
    Example:
      swiftbatch bench long --engine tokenswift --tokens 100000 --prefill 4096 --json long.json --plot long.png
    """
    from swiftbatch.jobs.sampling import SamplingParams
    from swiftbatch.worker.bench.long.long import LongBenchOptions, run_long_bench
    from swiftbatch.worker.bench.long.records import render

    sampling = {name: options.pop(name) for name in SamplingParams.model_fields.keys() & options.keys()}
    bench_options = checked(LongBenchOptions, options | {"sampling": sampling | {"ignore_eos": True}})
    show(render(run_long_bench(bench_options, say)))


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option("--engines", default=",".join(ENGINES), callback=_split, help="Names, comma-separated.")
@click.option(
    "--lengths", default="1000,20000,50000,100000", callback=_split, help="Positions in the caches, where they fit."
)
@click.option("--slots", "slot_counts", default="1,4", callback=_split, help="Sequences of a step, comma-separated.")
@click.option("--rows", "row_counts", default="1,16", callback=_split, help="Rows of each, comma-separated.")
@click.option("--read", "num_read", type=ANY_WHOLE_NUMBER, default=4096, help="Tokens of a prompt, behind each length.")
@click.option(
    "--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="To generate at each length with each engine."
)
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What fills the cache. [default: own text]")
@DTYPE
@CUDA_KERNELS
@JSON
def gpu(**options: Any) -> None:
    """Measure a GPU: steps beside what its memory allows, prompts, a resume, every engine, and the memory taken.

    Run `swiftbatch doctor --device cuda` first. Without --text the model writes its own, which takes minutes.

    \b
    Example:
      swiftbatch bench gpu --model DIR --text book.txt --json gpu.json
    """
    from swiftbatch.worker.bench.gpu.gpu import run_gpu_bench
    from swiftbatch.worker.bench.gpu.gpu_options import GPUBenchOptions
    from swiftbatch.worker.bench.gpu.records import render

    show(render(run_gpu_bench(checked(GPUBenchOptions, options), say)))


bench.add_command(ablation)
