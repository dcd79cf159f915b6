from __future__ import annotations

import numpy as np
import pytest

from bench.many_jobs import (
    DRAFTS_HOST,
    H100,
    HEADERS,
    NOTHING,
    PLAIN_HOST,
    RUNS,
    SIZES,
    JobMix,
    Options,
    Simulation,
    run,
    speed,
    way_before,
    way_now,
)
from bench.tables import tables
from swiftbatch.worker.drafters.choice.tree_sizes import PRIOR_ACCEPTANCE
from tests import ROOT

PAGE = (ROOT / "docs" / "gpu_lab_book.md").read_text(encoding="utf-8")
SHORT_JOBS, MIXED = RUNS[2:]
OF_VLLM = 5030  # tokens/s of 150 jobs at a time, computed from published measurements


def rows_of_page() -> dict[tuple[str, str], list[str]]:
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| H100") and " / " in line]
    return {(cells[0], cells[1]): cells[2:] for cells in lines}


def test_many_short_jobs_come_to_three_quarters_of_what_needs_no_exactness_and_beyond_it_with_drafts() -> None:
    shown = rows_of_page()[H100.name, SHORT_JOBS.name]
    plain = speed(H100, SHORT_JOBS, way_now(H100, SHORT_JOBS, NOTHING, PLAIN_HOST))
    assert shown[HEADERS.index("plain") - 2] == plain
    assert float(plain.split(" / ")[0].replace(",", "")) >= 0.75 * OF_VLLM
    assert float(shown[-1].split(" / ")[0].replace(",", "")) >= OF_VLLM


def test_one_long_job_makes_many_short_ones_no_slower() -> None:
    """Speeds count while jobs wait: at its end the long one is alone."""
    before, now = (
        Simulation(H100, MIXED, way).speeds()[0]
        for way in (way_before(H100, MIXED), way_now(H100, MIXED, NOTHING, PLAIN_HOST))
    )
    assert now >= 6 * before


def test_a_step_of_the_model_is_the_measured_one() -> None:
    """Four slots of 100,000 positions took 25.26 ms on the GPU, and 128 of 704 positions 15.1 ms with the host."""
    costs = H100.costs(64)
    assert costs.forward_seconds(1, 100_000, 4) == pytest.approx(25.26e-3, rel=0.05)
    many = H100.costs(128).forward_seconds(1, 704, 128) + PLAIN_HOST.seconds(128)
    assert many == pytest.approx(15.1e-3, rel=0.08)
    assert PLAIN_HOST.seconds(128) == pytest.approx(1.06e-3, rel=0.01)
    assert H100.costs(256).shared_seconds(256) - costs.shared_seconds(64) == pytest.approx(1.5e-3, rel=0.2)


def test_all_jobs_get_all_their_tokens() -> None:
    run = JobMix("few", (300, 5000, 700))
    simulation = Simulation(H100, run, way_now(H100, run, PRIOR_ACCEPTANCE, DRAFTS_HOST))
    full, whole = simulation.speeds()
    assert simulation.num_tokens == 6000
    assert full == whole  # none had to wait
    assert np.isclose(simulation.seconds, 6000 / whole)
    assert SIZES.bytes_per_position == 131_072


@pytest.mark.slow
def test_the_page_has_the_table() -> None:
    assert tables(run(Options()), is_markdown=True) in PAGE
