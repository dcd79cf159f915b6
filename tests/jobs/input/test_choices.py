"""Choices of a line are jobs of one name."""

from __future__ import annotations

from pathlib import Path

from swiftbatch.jobs.job import Job
from tests.jobs.input.job_lines import CHAT, GOOD, batch, read

FIRST_SEEDS = [
    7,
    4780485997906838156,
    5211299714817303270,
]  # with seed 7; results must not change between versions


def alone(job: Job) -> Job:
    return job.model_copy(update={"num_choices": 1, "choice_index": 0})


def test_each_choice_is_a_job_with_a_seed_of_its_own_and_the_first_has_the_line_s(tmp_path: Path) -> None:
    (single,), _ = read(tmp_path, GOOD)
    choices, rejects = read(tmp_path, GOOD | {"n": 128})
    assert rejects == []
    assert [job.choice_index for job in choices] == list(range(128))
    assert alone(choices[0]) == single
    assert len({job.sampling.seed for job in choices}) == len({job.job_id("m") for job in choices}) == 128
    unseeded = [alone(job).model_copy(update={"sampling": single.sampling}) for job in choices]
    assert unseeded == [single] * 128
    assert [job.name for job in choices[:2]] == ["good[0]", "good[1]"]
    assert single.name == "good"


def test_seeds_of_choices_follow_from_the_line_s_seed_and_from_the_index_alone(tmp_path: Path) -> None:
    def seeds(n: int, seed: int) -> list[int | None]:
        return [job.sampling.seed for job in read(tmp_path, GOOD | {"n": n, "seed": seed})[0]]

    assert seeds(3, 7) == seeds(5, 7)[:3] == FIRST_SEEDS
    assert not set(seeds(5, 7)) & set(seeds(5, 8))


def test_another_number_of_choices_is_another_job(tmp_path: Path) -> None:
    found = [{job.job_id("m") for job in read(tmp_path, GOOD | {"n": n})[0]} for n in (1, 2, 3)]
    assert len(set.union(*found)) == 6


def test_prompts_of_a_list_are_choices_in_their_order_and_n_of_each(tmp_path: Path) -> None:
    jobs, rejects = read(tmp_path, batch({"prompt": ["one", "two", "one"], "n": 2, "max_tokens": 5}))
    assert rejects == []
    assert [job.prompt for job in jobs] == ["one", "one", "two", "two", "one", "one"]
    assert [job.choice_index for job in jobs] == list(range(6))
    assert len({job.sampling.seed for job in jobs}) == 6
    ids, _ = read(tmp_path, batch({"prompt": [[1, 2], [3]]}))
    assert [job.prompt_ids for job in ids] == [(1, 2), (3,)]
    assert [Job.model_validate_json(job.model_dump_json()) for job in (*jobs, *ids)] == [*jobs, *ids]


def test_a_chat_has_choices_too(tmp_path: Path) -> None:
    jobs, _ = read(tmp_path, CHAT | {"n": 2, "best_of": 2})
    assert [(job.messages, job.num_choices) for job in jobs] == [(jobs[0].messages, 2)] * 2


def test_a_slug_says_which_choice_it_is(tmp_path: Path) -> None:
    jobs, _ = read(tmp_path, GOOD | {"n": 2})
    assert [job.job_id("m").rsplit("-", 1)[0] for job in jobs] == ["good-0", "good-1"]
