"""The command `verify`."""

from __future__ import annotations

import contextlib
import re
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from swiftbatch.jobs.run.run_records import LogprobsMode, SamplingDefaults
from swiftbatch.scheduler.commands.exit_codes import SOME_FAILED
from swiftbatch.scheduler.commands.options.option_types import ANY_WHOLE_NUMBER, DTYPES, KV_DTYPES, WholeNumber, filled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.runs.verification import Mismatch, VerificationReport

MOST_SHOWN = 10  # findings on the terminal; the report has all
PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


def _fraction(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Parse a percentage. Raises click.BadParameter."""
    found = PERCENT.fullmatch(value)
    if found is None or not 0 < float(found[1]) <= 100:
        raise click.BadParameter(f"found {value!a}, expected a part of the run's tokens, such as 1% or 100%")
    return float(found[1]) / 100


def _key(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Ed25519PrivateKey | None:
    """Read a private key. Raises click.BadParameter."""
    if path is None:
        return None
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise click.BadParameter("it needs the package cryptography: pip install 'swiftbatch[sign]'") from None
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise click.BadParameter(f"{path} is no Ed25519 key: `openssl genpkey -algorithm ed25519` makes one")
    return key


@click.command()
@click.argument("run_uri", metavar="RUN|FILE")
@click.argument("custom_ids", metavar="[JOB]...", nargs=-1)
@click.option("--sample", "fraction", default="1%", callback=_fraction, metavar="PERCENT", help="Part of the tokens.")
@click.option("--sample-seed", "seed", type=WholeNumber(0), help="Chooses the sample. [default: at random]")
@click.option("--model", callback=filled, help="Draw with this model. [default: the run's]")
@click.option("--jobs", multiple=True, metavar="FILE", help="Of an output FILE: the job file. Repeatable.")
@click.option("--dtype", type=DTYPES, help="Of an output FILE: as for `submit`, like the next.")
@click.option("--kv-dtype", type=KV_DTYPES)
@click.option("--seed", "run_seed", type=ANY_WHOLE_NUMBER)
@click.option("--max-tokens", type=WholeNumber(1))
@click.option("--sampling-defaults", type=click.Choice(get_args(SamplingDefaults)))
@click.option("--logprobs-mode", type=click.Choice(get_args(LogprobsMode)))
@click.option("--lenient-schemas", is_flag=True, default=None)
@click.option("--plain-content", is_flag=True, default=None)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the report.")
@click.option(
    "--sign",
    "key",
    callback=_key,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="KEY",
    help="Sign the report with this Ed25519 key (PEM), into FILE.sig.",
)
def verify(
    run_uri: str,
    custom_ids: tuple[str, ...],
    fraction: float,
    seed: int | None,
    model: str | None,
    json_path: Path | None,
    key: Ed25519PrivateKey | None,
    jobs: tuple[str, ...],
    **said: Any,
) -> None:
    """Draw a sample of a run's tokens again on this machine, and compare each with the result.

    At least 20 spans of 256 tokens are chosen at random over all results; of named JOBs, all tokens. The tokens before
    a span are read, which takes a fraction of the time that it took to draw them. The exit code is 1 if a result is
    not what the model draws. On other hardware than the run's, near ties may differ: `exact up to ties`.

    Without its run, an output FILE is verified with the jobs that it answers, and the options of their `submit`.

    \b
    Example:
      swiftbatch verify my-run --sample 5% --json report.json
      swiftbatch verify answers.jsonl --jobs jobs.jsonl --model Qwen/Qwen3-0.6B
    """
    from swiftbatch.scheduler.runs.verification import verify_run

    if json_path is not None and not json_path.parent.is_dir():
        raise click.UsageError(f"--json: found no folder {json_path.parent}, expected a file in one that exists")
    if key is not None and json_path is None:
        raise click.UsageError("--sign: expected --json with it, the file to sign")
    settings = {"seed" if name == "run_seed" else name: value for name, value in said.items() if value is not None}
    if jobs and model is None:
        raise click.UsageError("--jobs: expected --model with it, which their run had")
    if settings and not jobs:
        raise click.UsageError(
            f"--{next(iter(settings)).replace('_', '-')}: expected --jobs with it; a run has its own"
        )
    seed = secrets.randbelow(2**32) if seed is None else seed
    with _run(run_uri, jobs, {"model": model, **settings}) as run:
        found = verify_run(run, fraction, seed, custom_ids, None if jobs else model)
    if json_path is not None:
        _write(json_path, found.model_dump_json(indent=2).encode() + b"\n", key)
    for finding in found.findings[:MOST_SHOWN]:
        click.echo(_line(finding))
    if len(found.findings) > MOST_SHOWN:
        click.echo(f"and {len(found.findings) - MOST_SHOWN:,} more differences; --json FILE has all")
    click.echo(_summary(found))
    if found.verdict == "differs":
        click.get_current_context().exit(SOME_FAILED)


@contextlib.contextmanager
def _run(place: str, jobs: tuple[str, ...], said: dict[str, Any]) -> Iterator[Run]:
    """Open a run, or make one of an output file and its jobs for a while."""
    from swiftbatch.jobs.run.run import Run

    if jobs and Path(place).is_dir():
        raise click.UsageError(f"--jobs: found the folder {place} with it, expected an output FILE; a run has its own")
    if not jobs and Path(place).is_file():
        raise click.UsageError(f"{place} is a file: expected --jobs and --model with it, as its run had them")
    if not jobs:
        yield Run.open(place)
        return
    from swiftbatch.scheduler.runs.output_import import imported_run
    from swiftbatch.scheduler.runs.run_settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        yield imported_run(place, jobs, f"{folder}/run", Settings(said))


def _write(path: Path, report: bytes, key: Ed25519PrivateKey | None) -> None:
    """Write the report, and its signature beside it. Raises click.FileError."""
    try:
        path.write_bytes(report)
        if key is not None:
            path.with_name(f"{path.name}.sig").write_bytes(key.sign(report))
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from None


def _summary(found: VerificationReport) -> str:
    from swiftbatch.scheduler.display.progress_line import counted

    spans, jobs = counted(found.num_spans, "span"), counted(found.num_jobs, "job")
    place = f"{found.num_tokens:,} tokens of {spans} in {jobs}"
    differing = len({(each.custom_id, each.choice) for each in found.findings})
    if not differing:
        return f"exact: {place} are what this model draws (sample seed {found.sample_seed})"
    return (
        f"{found.verdict}: {counted(len(found.findings), 'difference')} in {counted(differing, 'job')}, among {place}"
    )


def _line(finding: Mismatch) -> str:
    from swiftbatch.scheduler.display.progress_line import printable

    job = printable(finding.custom_id if not finding.choice else f"{finding.custom_id}[{finding.choice}]")
    return f"job {job}: {_problem(finding)}"


def _problem(finding: Mismatch) -> str:
    place = None if finding.position is None else f"{finding.position + 1:,}"
    if finding.what == "job":
        return "its prompt tokens or its id are not those of its job"
    if finding.what == "line":
        return "its line has the name, choice or prompt of another job"
    if finding.what == "log":
        return "its token log is not that of its result"
    if finding.what == "text":
        return "its text is not that of its tokens"
    if finding.what in ("logprobs", "prompt"):
        return _problem_of_logprobs(finding, place)
    if finding.what == "output":
        return f"this model draws another text{'' if place is None else f' from character {place} on'}"
    if finding.recorded is None and finding.drawn is None:
        return "its finish_reason is not how this output ends"
    if finding.recorded is None:
        return f"it ends before token {place}, this model draws {finding.drawn} there"
    if finding.drawn is None:
        return f"it goes on with token {place}, this model ends before it"
    margin = "" if finding.margin is None else f" by a margin of {finding.margin:.3g}"
    return f"token {place} is {finding.recorded}, this model draws {finding.drawn}{margin}"


def _problem_of_logprobs(finding: Mismatch, place: str | None) -> str:
    of_prompt = finding.what == "prompt"
    if place is None:
        own = "its prompt's" if of_prompt else "its"
        return f"{own} log-probabilities are missing, or do not fit its tokens"
    token = f"prompt token {place}" if of_prompt else f"token {place}"
    if finding.margin is None:
        return f"the log-probabilities of {token} name other tokens than this model's"
    return f"a log-probability of {token} is not this model's, by {finding.margin:.3g}"
