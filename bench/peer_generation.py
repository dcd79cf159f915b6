"""Generates batches of jobs with vLLM or OpenVINO, whose Python runs this, and times each batch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Jobs = list[dict[str, Any]]  # of a job file; a prompt may be token ids
Generate = Callable[[Jobs], int]
"""Generates all jobs' texts, and returns the number of their tokens."""


def vllm(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    import torch
    from vllm import LLM, SamplingParams, __version__  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(model, **options)
    fields = ("max_tokens", "temperature", "min_p", "seed", "ignore_eos")

    def generate(jobs: Jobs) -> int:
        prompts = [job["prompt"] for job in jobs]
        given = [each if isinstance(each, str) else {"prompt_token_ids": each} for each in prompts]
        params = [SamplingParams(**{name: job[name] for name in fields}) for job in jobs]
        return sum(len(each.outputs[0].token_ids) for each in engine.generate(given, params, use_tqdm=False))

    return generate, {"version": __version__, "instructions": torch.backends.cpu.get_cpu_capability()}


def openvino(model: str, options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    import numpy as np
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]
    from openvino import Tensor  # type: ignore[import-not-found, unused-ignore]

    pipeline = genai.LLMPipeline(model, "CPU", **options)

    def generate(jobs: Jobs) -> int:
        """Greedily: all jobs have prompts and outputs of the same length."""
        ids = np.array([job["prompt"] for job in jobs], dtype=np.int64)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = jobs[0]["max_tokens"], True, False
        found = pipeline.generate(genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids))), config)
        return sum(map(len, found.tokens))

    return generate, {"version": genai.__version__, "instructions": ""}  # it does not say


def main(asked: dict[str, Any]) -> None:
    generate, about = {"vllm": vllm, "openvino": openvino}[asked["library"]](asked["model"], asked["options"])
    generate([job | {"max_tokens": min(8, job["max_tokens"])} for job in asked["batches"][0][:8]])
    batches = []
    for jobs in asked["batches"]:
        started = time.perf_counter()
        num_tokens = generate(jobs)
        batches.append({"num_tokens": num_tokens, "seconds": time.perf_counter() - started})
    with open(asked["found"], "w", encoding="utf-8") as file:  # both libraries print to the streams
        json.dump(about | {"batches": batches}, file)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as asked_file:
        main(json.load(asked_file))
