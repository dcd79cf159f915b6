"""Other programs that generate text from a GGUF file, in turns with swiftbatch."""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import PositiveInt

import swiftbatch
from bench.options import TextOptions
from bench.tables import Record
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import (
    BASELINE,
    BY_NAME,
    BenchEngine,
    BenchError,
    bench_slots,
    check_length,
    own_tokens,
    read_tokens,
    text_tokens,
)
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE
from swiftbatch.worker.forward.step_costs import seconds_now, step_costs_of
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence

SHORT, LONG, TOGETHER = 512, 4096, 8
FIGURES = (f"after {SHORT}", f"after {LONG}", f"prompt of {SHORT}", f"{TOGETHER} after {SHORT}")  # tokens a second
IN_LIBRARY = Path(__file__).with_name("peer_generation.py")  # only the libraries' Python imports it
ROOM = 2  # times the requested tokens, so that no sequence of a batch ends early
MOST_SECONDS = 3600
INSTRUCTIONS = ("AMX_INT8", "AVX512_BF16", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "AVX")  # the best one first
OURS = f"swiftbatch {BASELINE}"
EXACT = "cublas"  # on a CPU: the exact products
FASTEST: dict[str, tuple[str, ...]] = {"--llama-cpp": (), "--ik-llama-cpp": ("-rtr",)}  # weights repacked for this CPU


class Options(TextOptions):
    """The model is a GGUF file. Programs that are not given are left out."""

    llama_cpp: Path | None = None  # its llama-batched-bench
    ik_llama_cpp: Path | None = None  # its llama-batched-bench
    vllm: Path | None = None  # a Python with vLLM
    openvino: Path | None = None  # a Python with openvino-genai
    num_tokens: PositiveInt = 64
    num_rounds: PositiveInt = 3


def run(options: Options) -> Iterator[Record]:
    """Measure llama.cpp, ik_llama.cpp, vLLM and OpenVINO on the same GGUF file beside swiftbatch, all in turns.

    Figures are tokens a second: of one stream behind 512 and behind 4,096 tokens, of a prompt of 512, and of eight
    streams behind 512. llama.cpp's programs are `llama-batched-bench`, libraries are given as their Python. `--linear
    int8` measures swiftbatch with exact products and with rows of 8 bits.

    \b
    Example:
      python -m bench peers --model model.gguf --llama-cpp build/bin/llama-batched-bench --json peers.jsonl
    """
    if not options.model.endswith(".gguf"):
        raise BenchError(f"--model {options.model}: expected a GGUF file, which all programs read")
    programs = _programs({"--llama-cpp": options.llama_cpp, "--ik-llama-cpp": options.ik_llama_cpp})
    libraries = _programs({"--vllm": options.vllm, "--openvino": options.openvino})
    ours = [_Ours(options.model_copy(update={"linear": each})) for each in dict.fromkeys((EXACT, options.linear))]
    rounds = {name: turn for each in ours for name, turn in each.turns()}
    rounds |= {name[2:]: functools.partial(_in_llama_cpp, name, path, options) for name, path in programs.items()}
    text = ours[0].text
    rounds |= {
        name[2:]: functools.partial(_in_a_library, name, path, options, text) for name, path in libraries.items()
    }
    for number in range(options.num_rounds):
        order = [*rounds][number % len(rounds) :] + [*rounds][: number % len(rounds)]
        for name in order:
            yield {"program": name, "round": number} | rounds[name]()


def _programs(given: dict[str, Path | None]) -> dict[str, Path]:
    """Return the programs that were given, by option. Raises BenchError."""
    found = {name: path.absolute() for name, path in given.items() if path is not None}
    for name, path in found.items():
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise BenchError(f"{name} {path}: there is no such program")
    return found


def shown(records: list[Record], options: Options) -> list[Record]:
    """Return each program's medians, and their ratios to swiftbatch's plain decoding."""
    medians = {
        name: {figure: statistics.median(each[figure] for each in records if each["program"] == name)
               for figure in FIGURES}
        for name in dict.fromkeys(each["program"] for each in records)
    }  # fmt: skip
    about = {each["program"]: {key: each[key] for key in ("program", "version", "instructions")} for each in records}
    base = medians.get(OURS)
    return [
        about[name] | own | {f"ratio {figure}": own[figure] / base[figure] if base else None for figure in FIGURES}
        for name, own in medians.items()
    ]


class _Ours:
    """Engines that go on with the same cached text, as on a worker."""

    def __init__(self, options: Options) -> None:
        """Read the text into the caches."""
        self._options, files, room = options, locate_model(options.model), ROOM * options.num_tokens
        check_length(files, LONG, room)
        slots = bench_slots((BASELINE, DEFAULT_ENGINE), LONG + room, TOGETHER, files)
        self._target = options.load(files, slots)
        costs = step_costs_of(self._target)
        self.text = text_tokens(options.text, files, LONG) if options.text else own_tokens(self._target, LONG)
        self._engines = {
            name: BenchEngine(self._target, BY_NAME[name](self._target, costs, None))
            for name in (BASELINE, DEFAULT_ENGINE)
        }
        self._long, self._fresh = self._target.new_cache(LONG + room), self._target.new_cache(SHORT)
        self._short = [self._target.new_cache(SHORT + room) for _ in range(TOGETHER)]
        self._num_jobs = 0

    def turns(self) -> Iterator[tuple[str, Callable[[], Record]]]:
        linear = self._options.linear
        for engine in self._engines:
            name = f"swiftbatch {engine}" + (f" {linear}" if linear != EXACT else "")
            yield name, functools.partial(self.measure, engine)

    def measure(self, name: str) -> Record:
        engine = self._engines[name]
        self._fresh.roll_back(0)
        started = seconds_now()
        read_tokens(self._target, self._fresh, self.text[: SHORT + 1], [engine.drafter])
        seconds = seconds_now() - started
        rates = [
            self._rate(engine, self._short[:1], SHORT),
            self._rate(engine, [self._long], LONG),
            SHORT / seconds,
            self._rate(engine, self._short, SHORT),
        ]
        about = {"version": swiftbatch.__version__, "instructions": chosen_variant() or "none"}
        return about | dict(zip(FIGURES, rates, strict=True))

    def _rate(self, engine: BenchEngine, caches: list[FullKVCache], length: int) -> float:
        """Return the tokens a second of new jobs, one for each cache, whose prompts are read before."""
        jobs = []
        for cache in caches:
            cache.roll_back(min(cache.length, length - 1))
            read_tokens(self._target, cache, self.text[:length], [])
            sampled = self._options.model_dump(include={"temperature", "min_p"})
            most, self._num_jobs = ROOM * self._options.num_tokens, self._num_jobs + 1
            sampling = SamplingParams(
                max_tokens=most, seed=self._options.seed + self._num_jobs, ignore_eos=True, **sampled
            )
            jobs.append(Sequence(f"{self._num_jobs}", self.text[:length], sampling, self._target.vocab_size))
        for job, cache in zip(jobs, caches, strict=True):
            engine.start(job, cache)
        started = seconds_now()
        while min(job.num_generated_tokens for job in jobs) < self._options.num_tokens:
            engine.step()
        seconds = seconds_now() - started
        for job in jobs:
            engine.stop(job)
        return sum(job.num_generated_tokens for job in jobs) / seconds


def _in_llama_cpp(name: str, program: Path, options: Options) -> Record:
    """Raise BenchError if the program fails."""
    rows: dict[tuple[int, int], list[float]] = {}
    for prompt, numbers in ((SHORT, (1, TOGETHER)), (LONG, (1,))):
        sizes: Record = {"-c": numbers[-1] * (prompt + options.num_tokens), "-npp": prompt, "-ntg": options.num_tokens}
        sizes |= {"-npl": ",".join(map(str, numbers)), "-t": options.num_threads, "-m": Path(options.model).resolve()}
        given = [str(part) for pair in sizes.items() for part in pair] + ["-fa", "on", "-pps", *FASTEST[name]]
        with tempfile.TemporaryDirectory(prefix="swiftbatch-peers-") as folder:  # some write a log
            done = _run([str(program), *given], f"{name} {program}", folder=folder)
        for line in (done.stdout + done.stderr).splitlines():
            cells = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", line)] if line.startswith("|") else []
            if len(cells) == 10:  # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S
                rows[int(cells[0]), int(cells[2])] = [cells[5], cells[7]]
    wanted = ((SHORT, 1, 1), (LONG, 1, 1), (SHORT, 1, 0), (SHORT, TOGETHER, 1))
    if not {each[:2] for each in wanted} <= rows.keys():
        raise BenchError(f"{name} {program}: expected llama-batched-bench with its table, it printed another text")
    return _about_llama_cpp(name, program) | dict(
        zip(FIGURES, (rows[prompt, number][place] for prompt, number, place in wanted), strict=True)
    )


def _about_llama_cpp(name: str, program: Path) -> Record:
    """Return a program's version, and the best instructions that its library names if it is a file of its own."""
    told = _run([str(program), "--version"], f"{name} {program}")
    version = re.search(r"version: (.*)", told.stdout + told.stderr)
    library = re.search(
        r"libllama\.so\S* => (\S+)", subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    )
    names = ""
    if library is not None:
        code = "import ctypes, sys; tell = ctypes.CDLL(sys.argv[1]).llama_print_system_info; "
        code += "tell.restype = ctypes.c_char_p; print(tell().decode())"
        names = _run([sys.executable, "-c", code, library[1]], library[1]).stdout
    found = [name for name in INSTRUCTIONS if re.search(rf"\b{name} = 1", names)]
    return {"version": version[1] if version else "", "instructions": found[0].lower() if found else ""}


def _in_a_library(name: str, python: Path, options: Options, text: list[int]) -> Record:
    library = name.removeprefix("--")
    own = {"max_model_len": LONG + ROOM * options.num_tokens, "enable_prefix_caching": False}
    given = own if library == "vllm" else {"INFERENCE_NUM_THREADS": options.num_threads}
    cases = [(length, number, more) for length, number in ((SHORT, 1), (LONG, 1), (SHORT, TOGETHER)) for more in (0, 1)]
    batches = [
        [_line(options, text[:length], 1 + more * options.num_tokens, seed) for seed in range(number)]
        for length, number, more in cases
    ]
    found = in_library(library, python, options.model, given, batches, options.num_threads)
    short, short_on, long, long_on, many, many_on = (each["seconds"] for each in found["batches"])
    num_tokens = options.num_tokens
    rates = [num_tokens / (short_on - short), num_tokens / (long_on - long), SHORT / short]
    rates.append(TOGETHER * num_tokens / (many_on - many))
    return {key: found[key] for key in ("version", "instructions")} | dict(zip(FIGURES, rates, strict=True))


def _line(options: Options, prompt: list[int], num_tokens: int, seed: int) -> Record:
    sampled = options.model_dump(include={"temperature", "min_p"})
    return {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True} | sampled


def in_library(
    library: str, python: Path, model: str, options: Record, batches: list[list[Record]], num_threads: int
) -> Record:
    """Generate batches of jobs with a library, and time each; its start does not count.

    Raises BenchError.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "OMP_NUM_THREADS": str(len(cores))}
    with tempfile.TemporaryDirectory(prefix="swiftbatch-peers-") as folder:
        asked, found = Path(folder, "asked.json"), Path(folder, "found.json")
        words = {"library": library, "model": model, "options": options, "batches": batches, "found": str(found)}
        asked.write_text(json.dumps(words), encoding="utf-8")
        _run([str(python), "-P", str(IN_LIBRARY), str(asked)], f"--{library} {python}", threads | {"PYTHONPATH": ""})
        try:
            figures: Record = json.loads(found.read_text(encoding="utf-8"))
            timed = len(figures["batches"]) == len(batches) and {"version", "instructions"} <= figures.keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            timed = False
    if not timed:
        raise BenchError(f"--{library} {python}: expected a Python with this library, it wrote no figures")
    return figures


def _run(
    command: list[str], name: str, further: dict[str, str] | None = None, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Raise BenchError with the last line of a command that fails."""
    environment = os.environ | (further or {})
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, check=False, timeout=MOST_SECONDS,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise BenchError(f"{name}: cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{name}: it did not end within {MOST_SECONDS} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchError(f"{name}: it ended with exit code {done.returncode}: {last}")
    return done
