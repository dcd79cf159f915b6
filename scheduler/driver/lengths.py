"""The lengths that jobs will come to, as far as those that have ended in this run tell."""

from __future__ import annotations

from collections.abc import Iterable

NUM_SHARES = 64  # parts of `max_tokens` that lengths are counted in
NUM_DOUBTS = 4  # jobs that reach their limit, counted beside those that ended: the first few say little


class Lengths:
    """Counts at which share of their `max_tokens` jobs have ended."""

    def __init__(self) -> None:
        self._num_ended = [0] * (NUM_SHARES + 1)

    def note(self, num_tokens: int, max_tokens: int) -> None:
        """Count a job that has ended by itself or at its limit."""
        self._num_ended[_share(num_tokens, max_tokens)] += 1

    def forecast(self, running: Iterable[tuple[int, int]]) -> Forecast:
        """Forecast what comes; `running` are the tokens and the `max_tokens` of jobs that have not ended.

        These count as having lived so far (the estimate of Kaplan and Meier): short jobs end first, and would make all
        others look short.
        """
        num_alive = [0] * (NUM_SHARES + 1)
        for num_tokens, max_tokens in running:
            num_alive[_share(num_tokens, max_tokens)] += 1
        mean_left, num_at_risk = [0.0], NUM_DOUBTS + num_alive[-1] + self._num_ended[-1]
        for ended, alive in zip(self._num_ended[-2::-1], num_alive[-2::-1], strict=True):
            num_at_risk += ended + alive
            end_now = ended / num_at_risk
            mean_left.append(end_now / 2 + (1 - end_now) * (1 + mean_left[-1]))
        return Forecast(mean_left[::-1])


class Forecast:
    """Says how many tokens a job may still be expected to draw."""

    def __init__(self, mean_left: list[float]) -> None:
        """`mean_left`, at each share of a limit: the shares that come behind it on average."""
        self._mean_left = mean_left

    def final_tokens(self, num_tokens: int, max_tokens: int) -> int:
        """The tokens that a job with so many is expected to end with."""
        left = self._mean_left[_share(num_tokens, max_tokens)] * max_tokens / NUM_SHARES
        return min(max_tokens, num_tokens + round(left))


def _share(num_tokens: int, max_tokens: int) -> int:
    return min(NUM_SHARES, num_tokens * NUM_SHARES // max_tokens)
