"""Generates a job file's texts with vLLM, whose Python runs this."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(asked: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    jobs_file, found_file = asked.pop("jobs"), asked.pop("found")
    with open(jobs_file, encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    engine = LLM(**asked, enable_prefix_caching=True)
    fields = ("max_tokens", "temperature", "min_p", "seed", "ignore_eos")
    params = [SamplingParams(**{name: job[name] for name in fields}) for job in jobs]
    engine.generate([job["prompt"] for job in jobs[:8]], SamplingParams(max_tokens=8), use_tqdm=False)
    started = time.perf_counter()
    found = engine.generate([job["prompt"] for job in jobs], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(each.outputs[0].token_ids) for each in found)
    figures = {"num_tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}
    with open(found_file, "w", encoding="utf-8") as file:  # vLLM prints to the streams
        json.dump(figures, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
