"""Which models come onto a GPU with kernels of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.memory.plan import GPUMemory, plan_memory
from worker.memory.sizes import read_sizes
from worker.model.files import locate_model
from worker.target.cuda.loading import planned_forwards


def test_a_model_of_more_heads_than_the_kernels_take_is_left_to_others(tiny_model: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(tiny_model)
    config.update({"num_attention_heads": 32, "num_key_value_heads": 1})
    folder = shutil.copytree(tiny_model, tmp_path / "many-heads")
    LlamaForCausalLM(config).save_pretrained(folder)
    files = locate_model(str(folder))
    sizes = read_sizes(files, "float32")
    assert sizes is not None
    plan = plan_memory(sizes, GPUMemory(10**9, 3), 64, 1)
    assert planned_forwards(files, torch.float32, torch.device("cpu"), plan, 3, frozenset(), None) is None
