"""Figures of GRIFFIN's arms next to plain decoding, and what the paper's latency formula (appendix H) says of them."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.ablation_arms import PromptGeneration
from swiftbatch.worker.bench.bench_engine import digest

DIGITS = 4


def predicted_speedup(plain_ms: float, verify_ms: float, num_levels: float, level_ms: float, tau: float) -> float:
    """Equation 14: t / (t + d x tbar) x tau, with `verify_ms` as the t of the denominator.

    `plain_ms` is a forward of plain decoding, `level_ms` one of the draft model, of which a step has `num_levels`;
    `tau` counts the tokens of a step.
    """
    return plain_ms / (verify_ms + num_levels * level_ms) * tau


class GriffinFigures(Frozen):
    """Generations of one sequence each, next to plain decoding of their first tokens.

    All counts and times begin behind the first step, which reads what the draft model sees.
    """

    num_tokens: int  # behind all prompts
    num_plain_tokens: int
    ms_per_token: float
    plain_ms_per_token: float
    speedup: float
    tokens_per_step: float  # tau: the bonus token and steps without a draft included
    nodes_per_step: float
    levels_per_step: float  # d: forwards of the draft model
    level_ms: float  # tbar: all of drafting, shared out among them
    plain_verify_ms: float  # t: the target's forward over one row
    verify_ms: float  # its forward over a tree
    predicted_speedup: float  # by the formula, as if a tree cost what one row costs
    predicted_tree_speedup: float  # with what a tree costs
    tokens_sha256: str  # over the generated ids as little-endian uint32, prompt behind prompt

    @classmethod
    def of(cls, pairs: list[tuple[PromptGeneration, PromptGeneration]]) -> GriffinFigures:
        """Figures of generations, each with plain decoding behind the same prompt."""
        generations = [generation for generation, _ in pairs]
        total, plain = _Total.of(generations), _Total.of([plain for _, plain in pairs])
        tau, levels = total.num_tokens / total.num_steps, total.num_levels / total.num_steps
        level_ms = 1000 * total.draft_seconds / total.num_levels if total.num_levels else 0.0
        plain_verify_ms, verify_ms = plain.verify_ms, total.verify_ms
        return cls(
            num_tokens=total.num_tokens,
            num_plain_tokens=plain.num_tokens,
            ms_per_token=round(total.ms_per_token, DIGITS),
            plain_ms_per_token=round(plain.ms_per_token, DIGITS),
            speedup=round(plain.ms_per_token / total.ms_per_token, DIGITS),
            tokens_per_step=round(tau, DIGITS),
            nodes_per_step=round(total.num_nodes / total.num_steps, DIGITS),
            levels_per_step=round(levels, DIGITS),
            level_ms=round(level_ms, DIGITS),
            plain_verify_ms=round(plain_verify_ms, DIGITS),
            verify_ms=round(verify_ms, DIGITS),
            predicted_speedup=round(predicted_speedup(plain_verify_ms, plain_verify_ms, levels, level_ms, tau), DIGITS),
            predicted_tree_speedup=round(predicted_speedup(plain_verify_ms, verify_ms, levels, level_ms, tau), DIGITS),
            tokens_sha256=digest(*(token_ids for generation in generations for token_ids in generation.token_ids)),
        )


@dataclass
class _Total:
    """Generations behind their first steps, added up."""

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_levels: int = 0
    seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0

    @classmethod
    def of(cls, generations: list[PromptGeneration]) -> _Total:
        total = cls()
        for first, last in (generation.span for generation in generations):
            total.num_tokens += last.num_tokens - first.num_tokens
            total.num_steps += last.num_steps - first.num_steps
            total.num_nodes += last.num_draft_tokens - first.num_draft_tokens
            total.num_levels += last.draft.num_levels - first.draft.num_levels
            total.seconds += last.seconds - first.seconds
            total.verify_seconds += last.step_seconds["verify"] - first.step_seconds["verify"]
            total.draft_seconds += sum(last.draft.seconds.values()) - sum(first.draft.seconds.values())
        return total

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / self.num_tokens

    @property
    def verify_ms(self) -> float:
        """The time of verification, per step."""
        return 1000 * self.verify_seconds / self.num_steps
