"""A draft model that has learned nothing."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from swiftbatch.worker.papers.triforce.recipe import draft_config
from swiftbatch.worker.target.target import TargetModel


def untrained(target: TargetModel) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(draft_config(target.model.config))
