"""Defaults of trainings, without heavy imports because the command line shows them."""

from __future__ import annotations

TARGET_KIND = "qwen3"
TARGET_KINDS = (TARGET_KIND, "qwen3_5_text")
TARGET_TOKENS = 20_000_000  # 1.2 times the embedded model's books, hours on two processor cores
HEADS_STEPS = 200
HEADS_OWN_TEXTS = 0
DRAFT_STEPS = 1500
GRIFFIN_STEPS = 3600
GRIFFIN_OWN_TEXTS = 448
GRIFFIN_PASSES = 3
GRIFFIN_ALIGN_TOP_K = 3
MTP_STEPS = 1200
MTP_OWN_TEXTS = 448
SEED = 0
