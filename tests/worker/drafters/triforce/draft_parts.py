from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.train_draft import draft_config


def untrained(target: TargetModel) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(draft_config(target.model.config))
