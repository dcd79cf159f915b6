"""The kills of a chaos run and their times, drawn from a seed so that the run can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Kind = Literal["worker", "raylet", "driver", "stop", "hangup"]  # a stopped worker, a driver whose terminal closes
KINDS: tuple[Kind, ...] = get_args(Kind)
DRIVER_KINDS: tuple[Kind, ...] = ("driver", "hangup")  # wherever the workers are

QUIET_END = 0.15  # share of the run's tokens after which nothing is killed: a kill must not come too late to be done


@dataclass(frozen=True)
class PlannedKill:
    """A kill that is due when the whole run has generated `num_tokens`."""

    kind: Kind
    num_tokens: int


def plan_kills(num_kills: int, kinds: Sequence[Kind], num_tokens: int, random: Random) -> list[PlannedKill]:
    """One kill in each of `num_kills` equal stretches of a run of `num_tokens`; every kind equally often, shuffled."""
    drawn = [kinds[index % len(kinds)] for index in range(num_kills)]
    random.shuffle(drawn)
    stretch = num_tokens * (1 - QUIET_END) / max(1, num_kills)
    return [PlannedKill(kind, int(stretch * (index + random.random()))) for index, kind in enumerate(drawn)]
