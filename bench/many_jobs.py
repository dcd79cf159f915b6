"""Computes docs/gpu_lab_book.md's table of few and many jobs, without a GPU.

It plans as a worker does. Step times are a model: measured on an H100 with 64 rows, otherwise computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from bench.options import JSONOptions as Options
from bench.tables import Record
from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES, PRIOR_ACCEPTANCE, best_shares
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, MOST_SLOTS, MOST_SPLITS, NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import (
    GPUMemory,
    RunLoad,
    most_rows,
    one_slot,
    plan_pages,
    rows_that_pay,
)
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, Growth, most_pages, pages_of
from swiftbatch.worker.kv.model_sizes import ModelSizes

HEADERS = (
    *("GPU", "jobs", "rows, plain / drafts", "slots, 64 rows"),
    *("plain", "drafts, few accepted", "drafts, many accepted"),
)
SIZES = ModelSizes(8_030_261_248, 131_072, 32, 8, 128, 4096, 14336, 128_256, 2)  # Llama 3.1 8B
STEPS_AT_ONCE = 64  # with the same plan
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


H100 = GPU("H100 80 GB", 9, 3.104e12, 9.89e14, 8.0e-3, 5.8e-3, 3e-4)
MEMORY = GPUMemory(GPU_BYTES - CONTEXT_BYTES)


@dataclass(frozen=True)
class JobMix:
    """Jobs of these lengths in positions, with short prompts."""

    name: str
    lengths: tuple[int, ...]


def uniform(number: int, least: int, most: int) -> tuple[int, ...]:
    chance = random.Random(number)
    return tuple(chance.randint(least, most) for _ in range(number))


RUNS = (
    JobMix("5 x 100K", (100_000,) * 5),
    JobMix("30 x 16-32K", uniform(30, 16_000, 32_000)),
    JobMix("200 x 4-8K", uniform(200, 4000, 8000)),
    JobMix("one of 100K beside 199 of 6K", (100_000, *(6000,) * 199)),
)


@dataclass(frozen=True)
class Way:
    """A plan: rows of a forward, pages, slots, and acceptance of drafts."""

    num_rows: int
    num_slots: int
    num_pages: int | None  # None: each slot has room for the longest job
    acceptance: np.ndarray  # per node of a tree
    host: HostTime

    @property
    def tokens(self) -> np.ndarray:
        """Tokens per step and job, `[num_choices]`."""
        return np.array([1 + self.acceptance[:number].sum() for number in NODE_CHOICES])


NOTHING = np.zeros(NODE_CHOICES[-1])


def way_before(gpu: GPU, run: JobMix) -> Way:
    """Return the plan without pages: at most 32 slots of the longest job."""
    num_slots = min(MOST_SLOTS, one_slot(SIZES, MEMORY, max(run.lengths)).num_fitting)
    return Way(NUM_ROWS, num_slots, None, NOTHING, PLAIN_HOST)


def way_now(gpu: GPU, run: JobMix, acceptance: np.ndarray, host: HostTime) -> Way:
    load = RunLoad(len(run.lengths), sum(run.lengths) / len(run.lengths) / 2, bool(acceptance.any()))
    most = most_rows(gpu.capability, SIZES.item_size, is_packed=False)
    num_rows = rows_that_pay(SIZES, MEMORY, load, most)
    plan = plan_pages(SIZES, replace(MEMORY, num_rows=num_rows), max(run.lengths))
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
    num_tokens: float = 0.0

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
            if way.num_pages is not None and self.running and most_pages(beside, GPU_PAGE) > way.num_pages:
                return
            self.running.append(self.waiting.pop(0))

    def _advance(self, costs: StepCosts) -> None:
        """Advance some steps with one plan."""
        way, number = self.way, len(self.running)
        lengths, tokens = np.array([job.now for job in self.running]), np.tile(way.tokens, (number, 1))
        chosen, rate = best_shares(costs, tokens, lengths, way.host.seconds(number))
        brought = tokens[np.arange(number), chosen]
        step = float(brought.sum()) / rate
        lefts = np.array([job.left for job in self.running])
        num_steps = min(STEPS_AT_ONCE, max(1, int((lefts / brought).min())))
        grown = np.minimum(np.ceil(brought * num_steps), lefts).astype(int)
        self.seconds += num_steps * step
        self.num_tokens += float(grown.sum())
        grew = [Growth(job.now + int(more), job.end) for job, more in zip(self.running, grown, strict=True)]
        self.running = [job for job in grew if job.left]

    def _throw_out(self) -> None:
        if self.way.num_pages is None:
            return
        while sum(pages_of(job.now, GPU_PAGE) for job in self.running) > self.way.num_pages and len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())


def speed(gpu: GPU, run: JobMix, way: Way) -> str:
    return " / ".join(f"{each:,.0f}" for each in Simulation(gpu, run, way).speeds())


def table_rows(gpu: GPU) -> Iterator[list[str]]:
    for run in RUNS:
        ways = {
            "before": way_before(gpu, run),
            "plain": way_now(gpu, run, NOTHING, PLAIN_HOST),
            "few": way_now(gpu, run, PRIOR_ACCEPTANCE / 2, DRAFTS_HOST),
            "many": way_now(gpu, run, PRIOR_ACCEPTANCE, DRAFTS_HOST),
        }
        num_rows = f"{ways['plain'].num_rows} / {ways['many'].num_rows}"
        yield [gpu.name, run.name, num_rows, *(speed(gpu, run, way) for way in ways.values())]


def run(options: Options) -> Iterator[Record]:
    """Compute the table of few and of many jobs in docs/gpu_lab_book.md, planned as a worker plans.

    --markdown prints it as there.

    \b
    Example:
      python -m bench many-jobs --markdown
    """
    yield from (dict(zip(HEADERS, cells, strict=True)) for cells in table_rows(H100))
