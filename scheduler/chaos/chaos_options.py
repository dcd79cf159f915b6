"""The options of a chaos run, its job file and commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.scheduler.demo.prompts import PROMPTS
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE

WORKER_TIMEOUT = 10  # seconds; a stopped worker should be noticed soon
STORE_RETRIES = Retries(120.0)  # chaos' own reads of a run
PROMPT_TEXTS = tuple(PROMPTS.values())
SAMPLING: tuple[dict[str, Any], ...] = (  # used in turn; a resumed job must restore all of it
    {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.1, "presence_penalty": 0.2},
)


class ChaosError(UserError):
    """A chaos run that can't start or go on."""


@dataclass(frozen=True)
class ChaosOptions:
    num_jobs: int
    num_tokens: int  # per job
    num_kills: int
    seed: int
    num_workers: int
    num_slots: int
    model: str
    checkpoint_tokens: int
    run_uri: str  # parent of both runs
    engine: str = DEFAULT_ENGINE
    engine_options: tuple[str, ...] = ()
    device: str = Computation.device
    kinds: tuple[str, ...] = ()  # of kills; empty: all that the cluster allows
    address: str | None = None  # the user's cluster; None starts one
    num_nodes: int | None = None  # nodes of a started cluster, each with its own network; None: without

    @property
    def num_run_tokens(self) -> int:
        return self.num_jobs * self.num_tokens

    @property
    def tokens_per_checkpoint(self) -> int:
        """Return the tokens of the whole run between two checkpoints."""
        return self.checkpoint_tokens * self.num_at_a_time

    @property
    def num_at_a_time(self) -> int:
        return min(self.num_jobs, self.num_workers * self.num_slots)

    def submit_args(self, jobs_file: Path, run_uri: str, address: str) -> list[str]:
        args = ["submit", str(jobs_file), "--run", run_uri, "--model", self.model, "--seed", str(self.seed)]
        args += ["--device", self.device, "--engine", self.engine]
        args += [f"--engine-option={text}" for text in self.engine_options]
        return args + self._launch_args(address)

    def resume_args(self, run_uri: str, address: str) -> list[str]:
        return ["resume", run_uri, *self._launch_args(address)]

    def takeover_args(self, run_uri: str, address: str) -> list[str]:
        return [*self.resume_args(run_uri, address), "--takeover"]

    def _launch_args(self, address: str) -> list[str]:
        max_attempts = self.num_kills + 1  # every kill may hit the same job
        args = ["--workers", self.num_workers, "--slots", self.num_slots, "--address", address]
        args += ["--checkpoint-tokens", self.checkpoint_tokens, "--max-attempts", max_attempts]
        args += ["--worker-timeout", WORKER_TIMEOUT, "--json"]
        return [str(arg) for arg in args]


def write_jobs(path: Path, options: ChaosOptions) -> list[str]:
    jobs = list(_jobs(options))
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")
    return [job["custom_id"] for job in jobs]


def _jobs(options: ChaosOptions) -> Iterator[dict[str, Any]]:
    limits = {"max_tokens": options.num_tokens, "ignore_eos": True}
    for number in range(options.num_jobs):
        prompt, sampling = PROMPT_TEXTS[number % len(PROMPT_TEXTS)], SAMPLING[number % len(SAMPLING)]
        yield {"custom_id": f"chaos-{number:03d}", "prompt": prompt, **limits, **sampling}
