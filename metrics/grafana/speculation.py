"""The dashboard Speculation: how well drafts are accepted, and where the time of a step goes."""

from __future__ import annotations

from swiftbatch.metrics.grafana.panel import DRIVER, RATE, WORKER, Board, lines, stack, value


def _rate(name: str, labels: str = "", selector: str = DRIVER) -> str:
    """The rate of a counter, summed over all labels but `labels`."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate(swiftbatch_{name}{{{selector}}}[{RATE}]))"


DRAFTS, DRAFTED, ACCEPTED = (
    f"run_spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")
)
LENGTH = f"1 + {_rate(ACCEPTED)} / {_rate(DRAFTS)}"
LENGTH_BY_DRAFTER = f"1 + {_rate(ACCEPTED, 'drafter')} / {_rate(DRAFTS, 'drafter')}"
LENGTH_BY_WORKER = (
    f"1 + {_rate('spec_decode_num_accepted_tokens_total', 'worker', WORKER)}"
    f" / {_rate('spec_decode_num_drafts_total', 'worker', WORKER)}"
)
STEP_BY_PHASE = f"{_rate('run_step_seconds_sum', 'phase')} / {_rate('run_step_seconds_count', 'phase')}"

NUMBERS = (
    value("Mean acceptance length", "Tokens per verified draft, with the bonus token.", LENGTH),
    value("Acceptance rate", "Accepted of all drafted tokens.", f"{_rate(ACCEPTED)} / {_rate(DRAFTED)}", "percentunit"),
    value(
        "Tokens that were drafted",
        "Share of the generated tokens that a drafter had proposed.",
        f"{_rate(ACCEPTED)} / {_rate('run_generation_tokens_total')}",
        "percentunit",
    ),
    value("Step", "Time of a whole step.", f"sum({STEP_BY_PHASE})", "s"),
)
CHARTS = (
    lines(
        "Mean acceptance length by drafter",
        "Tokens per verified draft, with the bonus token. Plain decoding has 1, and no line.",
        LENGTH_BY_DRAFTER,
        "{{drafter}}",
    ),
    lines(
        "Mean acceptance length by worker",
        "Workers have different jobs: a text that repeats itself is drafted better.",
        LENGTH_BY_WORKER,
        "{{worker}}",
    ),
    lines(
        "Acceptance rate by drafter",
        "Accepted of all drafted tokens; in a tree most nodes can't be accepted.",
        f"{_rate(ACCEPTED, 'drafter')} / {_rate(DRAFTED, 'drafter')}",
        "{{drafter}}",
        "percentunit",
    ),
    lines(
        "Accepted by position",
        "Share of the drafts of which the token at this position was accepted; 0 is the first.",
        f"{_rate('run_spec_decode_num_accepted_tokens_per_pos_total', 'position')}"
        f" / ignoring (position) group_left () {_rate(DRAFTS)}",
        "{{position}}",
        "percentunit",
    ),
    lines(
        "Nodes per draft",
        "Size of the draft trees.",
        f"{_rate(DRAFTED, 'drafter')} / {_rate(DRAFTS, 'drafter')}",
        "{{drafter}}",
    ),
    stack(
        "Tokens by draft",
        "What the steps verified that brought them: a chain that the target drew itself, a drafter's tree, or nothing.",
        _rate("run_generation_tokens_by_draft_total", "draft"),
        "{{draft}}",
    ),
    stack(
        "Time of a step by phase",
        "Propose is the drafter, verify the target's forward, commit all that is left.",
        STEP_BY_PHASE,
        "{{phase}}",
        "s",
    ),
    stack(
        "Share of time by phase",
        "A cheap drafter leaves nearly all to verify.",
        f"{_rate('run_step_seconds_sum', 'phase')} / ignoring (phase) group_left () {_rate('run_step_seconds_sum')}",
        "{{phase}}",
        "percentunit",
    ),
    stack(
        "Share of tokens by drafter",
        "Where runs with several engines are shown.",
        f"{_rate('run_generation_tokens_total', 'drafter')}"
        f" / ignoring (drafter) group_left () {_rate('run_generation_tokens_total')}",
        "{{drafter}}",
        "percentunit",
    ),
)
SPECULATION = Board("Speculation", "How well drafts are accepted, and what they cost.", NUMBERS + CHARTS)
