"""Computes docs/gpu.md's table of runs of many jobs, without a GPU.

It plans as a worker does. Step times are a model: measured on an H100 with 64 rows, otherwise computed. Bandwidths,
memory and tensor cores of an A100 are those of NVIDIA's data sheet (2021), in the shares that the H100 reaches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from bench.options import JSONOptions as Options
from bench.sizing import DENSE
from bench.sizing import H100 as H100_MEMORY
from bench.tables import Record
from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES, PRIOR_ACCEPTANCE, best_shares
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.inspection import CONTEXT_BYTES
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, MOST_SPLITS, NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, RunLoad, most_rows, plan_pages, rows_that_pay
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, Growth, most_pages, pages_of

HEADERS = ("GPU", "jobs", "rows, plain / drafts", "plain", "drafts, few accepted", "drafts, many accepted")
SIZES = DENSE["Llama 3.1 8B"]
STEPS_AT_ONCE, STEPS_AT_PROMPTS = 64, 8  # with the same plan
GROUP_ROWS = 16  # rows of a sequence that share one read of its keys
SIXTEEN_ROWS = 1.07  # times one row's attention: measured
BUSY_SHARE = 0.6  # of a GPU's tensor cores in products: computed
BLOCKS_LOST = 2  # of time for each split: fitted to a step of 128 jobs, whose keys came at 2.0 TB/s in splits of four
DRAW_SECONDS = 1e-4  # for 64 rows: computed


@dataclass(frozen=True)
class HostTime:
    """Seconds that the host adds to a step."""

    base: float
    per_job: float

    def seconds(self, num_jobs: int) -> float:
        return self.base + num_jobs * self.per_job


PLAIN_HOST, DRAFTS_HOST = HostTime(1.7e-4, 7e-6), HostTime(3e-4, 1e-5)  # near what was measured without a GPU


@dataclass(frozen=True)
class GPU:
    """A GPU's speed."""

    name: str
    capability: int
    bandwidth: float  # bytes a second of a plain read
    flops: float  # peak of its tensor cores in bfloat16
    forward: float  # seconds of a forward of 64 rows, without keys and values
    products: float  # the share of its products
    wide: float  # seconds that more than 64 rows add at least
    memory: GPUMemory

    def costs(self, num_rows: int) -> StepCosts:
        multiplied = 2 * num_rows * SIZES.num_parameters / (BUSY_SHARE * self.flops)
        beyond = max(self.wide, multiplied - self.products) if num_rows > NUM_ROWS else 0.0
        base = self.forward + beyond + DRAW_SECONDS * (num_rows / NUM_ROWS - 1)
        factors = [
            (1 + (SIXTEEN_ROWS - 1) * min(rows, GROUP_ROWS) / GROUP_ROWS) * -(-rows // GROUP_ROWS)
            for rows in ROW_COUNTS
        ]
        position = SIZES.bytes_per_position / self.bandwidth
        longest = BLOCK * HEAD_BLOCKS * MOST_SPLITS  # of prefixes in splits of the fewest blocks
        lengths, lost = (0, longest, 4 * longest), BLOCK * BLOCKS_LOST * MOST_SPLITS
        read = (0, longest + lost, 4 * longest + lost)
        seconds = np.array([[base + number * position * factor for factor in factors] for number in read])
        return StepCosts(lengths, seconds, num_rows)


H100 = GPU("H100 80 GB", 9, 3.104e12, 9.89e14, 8.0e-3, 5.8e-3, 3e-4, H100_MEMORY)
H100_PUBLISHED = 3.35e12  # its bandwidth by the data sheet


def a100(name: str, published: float, memory: GPUMemory) -> GPU:
    """Return an A100 with a bandwidth by its data sheet; all but products takes as long as on the H100."""
    products = H100.products * H100_PUBLISHED / published  # of 64 rows: they wait for weights
    bandwidth = H100.bandwidth * published / H100_PUBLISHED
    return GPU(name, 8, bandwidth, 3.12e14, H100.forward - H100.products + products, products, H100.wide, memory)


GPUS = (
    H100,
    a100("A100 80 GB", 2.039e12, H100_MEMORY),
    a100("A100 40 GB", 1.555e12, GPUMemory(42 * 10**9 - CONTEXT_BYTES)),
)


@dataclass(frozen=True)
class JobMix:
    """Jobs of these lengths in positions, prompts included."""

    name: str
    lengths: tuple[int, ...]
    prompt: int = 0


def uniform(number: int, least: int, most: int) -> tuple[int, ...]:
    chance = random.Random(number)
    return tuple(chance.randint(least, most) for _ in range(number))


RUNS = (
    JobMix("200 x 4-8K", uniform(200, 4000, 8000)),
    JobMix("one of 100K beside 199 of 6K", (100_000, *(6000,) * 199)),
    JobMix("200 prompts of 4K, 500 tokens each", (4500,) * 200, prompt=4000),
)


@dataclass(frozen=True)
class Way:
    """A plan: rows of a forward, pages, slots, and acceptance of drafts."""

    num_rows: int
    num_slots: int
    num_pages: int
    acceptance: np.ndarray  # per node of a tree
    host: HostTime

    @property
    def tokens(self) -> np.ndarray:
        """Tokens per step and job, `[num_choices]`."""
        return np.array([1 + self.acceptance[:number].sum() for number in NODE_CHOICES])


NOTHING = np.zeros(NODE_CHOICES[-1])


def way_now(gpu: GPU, run: JobMix, acceptance: np.ndarray, host: HostTime) -> Way:
    mean_length = (sum(run.lengths) / len(run.lengths) + run.prompt) / 2
    load = RunLoad(len(run.lengths), mean_length, bool(acceptance.any()))
    most = most_rows(gpu.capability, SIZES.item_size, is_packed=False)
    num_rows = rows_that_pay(SIZES, gpu.memory, load, most)
    plan = plan_pages(SIZES, replace(gpu.memory, num_rows=num_rows), max(run.lengths))
    return Way(num_rows, plan.num_slots, plan.num_pages, acceptance, host)


@dataclass
class Simulation:
    """A worker that only counts, with the driver's rules."""

    gpu: GPU
    run: JobMix
    way: Way
    waiting: list[Growth] = field(default_factory=list)
    running: list[Growth] = field(default_factory=list)  # oldest first
    seconds: float = 0.0
    num_tokens: float = 0.0  # without prompts

    def speeds(self) -> tuple[float, float]:
        """Return tokens a second while some jobs wait, and over all."""
        self.waiting = [Growth(0, length) for length in self.run.lengths]
        costs = self.gpu.costs(self.way.num_rows)
        full = 0.0
        while self.waiting or self.running:
            self._begin()
            self._advance(costs)
            self._throw_out()
            if self.waiting:
                full = self.num_tokens / self.seconds
        whole = self.num_tokens / self.seconds
        return full or whole, whole

    def _begin(self) -> None:
        way = self.way
        while self.waiting and len(self.running) < way.num_slots:
            beside = [*self.running, self.waiting[0]]
            if self.running and most_pages(beside, GPU_PAGE) > way.num_pages:
                return
            self.running.append(self.waiting.pop(0))

    def _advance(self, costs: StepCosts) -> None:
        """Advance some steps with one plan. Prompts take the rows that decoding leaves free, as in `Prefiller`."""
        way, reading = self.way, [job for job in self.running if job.now < self.run.prompt]
        decoding = [job for job in self.running if job.now >= self.run.prompt]
        number, step, num_rows, most = len(decoding), 0.0, 0, STEPS_AT_PROMPTS if reading else STEPS_AT_ONCE
        if decoding:
            drafted = np.ones_like(way.tokens) if reading else way.tokens  # while prompts wait, nothing is drafted
            lengths, tokens = np.array([job.now for job in decoding]), np.tile(drafted, (number, 1))
            chosen, rate = best_shares(costs, tokens, lengths, way.host.seconds(number))
            brought = tokens[np.arange(number), chosen]
            step, num_rows = float(brought.sum()) / rate, number + sum(NODE_CHOICES[each] for each in chosen)
            lefts = np.array([job.left for job in decoding])
            most = min(most, max(1, int((lefts / brought).min())))
            grown = np.minimum(np.ceil(brought * most), lefts).astype(int)
            self.num_tokens += float(grown.sum())
            decoding = [Growth(job.now + int(more), job.end) for job, more in zip(decoding, grown, strict=True)]
        read, seconds = self._read(costs, reading, num_rows, number, most)
        self.seconds += most * step + seconds
        self.running = [job for job in (*decoding, *read) if job.left]

    def _read(
        self, costs: StepCosts, reading: list[Growth], num_rows: int, number: int, num_steps: int
    ) -> tuple[list[Growth], float]:
        """Return jobs further on in their prompts, and the seconds that this adds to steps of decoding jobs."""
        width, seconds, read = self.way.num_rows, 0.0, list[Growth]()
        free = -num_rows % width
        if free * (1 + number) < width:  # one more forward
            free += width
        if reading and free >= width:
            seconds += num_steps * (costs.shared_seconds(width) + (0.0 if number else self.way.host.seconds(1)))
        left = num_steps * free
        for job in reading:
            more = min(left, self.run.prompt - job.now)
            own = costs.forward_seconds(GROUP_ROWS, job.now + more // 2, 1) - costs.shared_seconds(GROUP_ROWS)
            seconds, left = seconds + own * more / GROUP_ROWS, left - more
            read.append(Growth(job.now + more, job.end))
        return read, seconds

    def _throw_out(self) -> None:
        while sum(pages_of(job.now, GPU_PAGE) for job in self.running) > self.way.num_pages and len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())


def speed(gpu: GPU, run: JobMix, way: Way) -> str:
    return " / ".join(f"{each:,.0f}" for each in Simulation(gpu, run, way).speeds())


def table_rows() -> Iterator[list[str]]:
    for gpu, run in itertools.product(GPUS, RUNS):
        ways = {
            "plain": way_now(gpu, run, NOTHING, PLAIN_HOST),
            "few": way_now(gpu, run, PRIOR_ACCEPTANCE / 2, DRAFTS_HOST),
            "many": way_now(gpu, run, PRIOR_ACCEPTANCE, DRAFTS_HOST),
        }
        num_rows = f"{ways['plain'].num_rows} / {ways['many'].num_rows}"
        yield [gpu.name, run.name, num_rows, *(speed(gpu, run, way) for way in ways.values())]


def run(options: Options) -> Iterator[Record]:
    """Compute the table of runs of many jobs in docs/gpu.md, planned as a worker plans.

    --markdown prints it as there.

    \b
    Example:
      python -m bench many-jobs --markdown
    """
    yield from (dict(zip(HEADERS, cells, strict=True)) for cells in table_rows())
