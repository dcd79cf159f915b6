from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.shared_prompts import KEY_TOKENS, NOT_SHARED, prompt_keys, shared_prompts
from tests.jobs.run.table_file import from_parquet, to_parquet

BOOK = list(range(10 * KEY_TOKENS))


def test_a_prompt_shares_the_whole_blocks_of_tokens_that_another_begins_with() -> None:
    prompts = [[*BOOK, 7], [*BOOK[:300], 0, 0], [5, *BOOK], BOOK[:63], [*BOOK[:200], 1]]
    found = shared_prompts([prompt_keys(prompt) for prompt in prompts])
    assert [prompt.num_tokens for prompt in found] == [256, 256, 0, 0, 192]


def test_prompts_that_are_alike_for_half_of_their_length_are_of_one_group() -> None:
    book, other = BOOK, BOOK[:KEY_TOKENS] + BOOK[: 9 * KEY_TOKENS]  # after a common first block
    prompts = [[*book, 1], [*other, 2], [3] * 200, [*book[:500], 4], [*other, 5]]
    groups = [prompt.group for prompt in shared_prompts([prompt_keys(prompt) for prompt in prompts])]
    assert groups[0] == groups[3] is not None
    assert groups[1] == groups[4] is not None
    assert groups[0] != groups[1]
    assert groups[2] is None


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=5), max_size=12))
def test_what_is_shared_is_what_a_look_at_all_pairs_finds(prompts: list[list[str]]) -> None:
    """Each letter is a block of tokens."""
    tokens = [[ord(letter) for letter in prompt for _ in range(KEY_TOKENS)] for prompt in prompts]
    found = shared_prompts([prompt_keys(prompt) for prompt in tokens])
    for place, own in enumerate(prompts):
        pairs = [zip(own, other, strict=False) for i, other in enumerate(prompts) if i != place]
        others = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
        assert found[place].num_tokens == KEY_TOKENS * max(others, default=0)


def test_keys_lie_in_the_table_of_jobs_and_older_tables_have_none() -> None:
    job = Job(custom_id="a", url="/v1/completions", prompt="x", sampling=SamplingParams(max_tokens=1, seed=1))
    records = [JobRecord("a", job, 1, 640, prompt_keys=prompt_keys(BOOK)), JobRecord("b", job, 2, 5)]
    assert from_parquet(to_parquet(records, "run-1")) == records
    assert from_parquet(to_parquet(records[1:], "run-1")) == records[1:]
    assert shared_prompts([b"", b""]) == [NOT_SHARED] * 2
