"""Plans the rounds of `auto`'s chains: tokens per second by measured costs and running agreement."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES, together
from swiftbatch.worker.drafters.self_speculation import ChainTree, RoundPlan
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kv.scan_cache import MOST_ENTRIES

CHAIN_LENGTHS = (3, 5, 7, 9, 11, 15, 19, 23, 27, 31)
FEW_ROWS = np.arange(max(CHAIN_LENGTHS) + 2)  # possible rows per sequence: none up to a chain and its root
ROUND_NODES = (0, 1, 3)  # tree sizes that a round may check, some of `NODE_CHOICES`
CHAIN_LEARNING_RATE = 0.03
PRIOR_ROUNDS = 4  # the prior's weight; the first chain where rounds do not pay is the last one
STEPS_TO_KNOW = 4  # steps with rounds before rounds are planned for several sequences
MOST_SLOWNESS = 3.0  # cap on one chain's slowness: a slow moment tells nothing of the next
SLOWEST = 100.0  # cap on all slowness: a state with more is refused as damaged
PRIOR_TRIALS = 20.0  # tokens that the prior agreement counts for
PRIOR_ALIKE = 0.95
KEPT = 0.97  # share of the earlier weight that stays at every step
MOST_COUNTED = TILE_ROWS / (1 - KEPT)  # most weight in tokens, if every chain has the greatest length

# costs of rounds, measured on a CPU
SCAN_SHARE = 0.08  # time to scan all keys for a row / time to attend to them
ROW_SHARE = 0.33  # time of a sequence's next row / time of its first row, in a scan
ROUND_SECONDS = 0.00002  # a round's time beside its forward
TREE_SECONDS = 0.0003  # further time of a round with trees
ROW_SECONDS = 0.0002  # time of each further row of a sequence: its search for the best keys
TAKING_IN_ROWS = 10  # cost of preparing a text for scans, in rows' attention to it


@dataclass(frozen=True)
class RoundsChoice:
    """A choice of rounds: how many nodes each round checks, the chain's length, and the expected rate."""

    num_nodes: int
    chain_length: int
    rate: float  # tokens per second of all sequences

    def plan(self) -> RoundPlan:
        return RoundPlan(TILE_ROWS, self.num_nodes, self.chain_length, self.chain_length)


@dataclass(frozen=True)
class _Texts:
    """Seconds that attention takes for all sequences of a step together, by number of rows."""

    number: int
    all_keys: list[float]
    entries: list[float]  # attention to the entries that a round reads exactly
    beyond: float  # attention of one row to all others


class RoundsPlanner:
    """Plans the rounds of steps: one plan for all sequences, since they wait for each other."""

    def __init__(self, costs: StepCosts) -> None:
        self._probed = self._costs = costs
        self._expected = 0.0  # seconds of a coming round, before `_slowness`
        self._slowness = 1.0  # measured / expected time of rounds on this machine
        self._num_rounds = self._num_steps = 0
        self._alike = PRIOR_ALIKE * PRIOR_TRIALS  # chain tokens that the target drew as well
        self._compared = PRIOR_TRIALS

    def best(self, lengths: np.ndarray, tree_tokens: np.ndarray, overhead: float) -> RoundsChoice:
        """Choose the best rounds for sequences with the cached positions `lengths [num_sequences]`.

        `tree_tokens [num_sequences, num_choices]`: expected tokens of trees of `NODE_CHOICES` nodes; `overhead`: a
        step's seconds outside forwards and drafting.
        """
        self._costs = self._probed.as_routed()
        texts = self._texts(lengths)
        chains = [
            (chain, len(lengths) * self._tokens(chain), together(self._forward_seconds(texts, chain + 1), overhead))
            for chain in CHAIN_LENGTHS
        ]
        best = RoundsChoice(0, 0, 0.0)
        for num_nodes in ROUND_NODES:
            drawn = float(tree_tokens[:, NODE_CHOICES.index(num_nodes)].mean())
            round_seconds = self._slowness * self._round_seconds(texts, num_nodes)
            for chain_length, tokens, verifying in chains:
                rate = tokens / (max(1.0, chain_length / drawn) * round_seconds + verifying)
                if rate > best.rate:
                    best = RoundsChoice(num_nodes, chain_length, rate)
        return best

    def taking_in_seconds(self, lengths: np.ndarray) -> float:
        """Return the seconds of preparing texts of `lengths [num_sequences]` for scanning."""
        return TAKING_IN_ROWS * float(self._costs.own_seconds(np.array([1]), lengths).clip(min=0.0).sum())

    def begin(self, rounds: RoundsChoice, lengths: np.ndarray) -> float:
        """Begin a step; return the expected seconds of its verification."""
        self._num_steps += 1
        texts = self._texts(lengths)
        self._expected = self._round_seconds(texts, rounds.num_nodes) / texts.number
        return self._forward_seconds(texts, rounds.chain_length + 1)

    @property
    def is_new(self) -> bool:
        return self._num_steps < STEPS_TO_KNOW

    def observe(self, proposed: ChainTree, path: list[int]) -> None:
        """Learn from a fully verified proposal whose nodes of `path` were accepted."""
        if not proposed.rounds:  # there was no depth for one
            return
        num_rounds = len(proposed.rounds)
        found = median(round_.seconds for round_ in proposed.rounds) / self._expected
        slowness = min(MOST_SLOWNESS * self._slowness, SLOWEST, found)
        self._num_rounds += num_rounds
        rate = num_rounds * max(
            CHAIN_LEARNING_RATE, 1 / (PRIOR_ROUNDS + self._num_rounds)
        )  # the first of them tell most
        self._slowness += min(1.0, rate) * (slowness - self._slowness)
        num_alike = sum(node < proposed.chain_length for node in path)
        num_compared = min(num_alike + 1, max(1, proposed.chain_length))  # nothing drawn is nothing alike
        self._alike, self._compared = KEPT * self._alike + num_alike, KEPT * self._compared + num_compared

    def state(self) -> dict[str, np.ndarray]:
        return {"rounds_plan": np.array([self._slowness, self._alike, self._compared])}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore a result of `state`. Raises ValueError for arrays that do not fit."""
        found = state.get("rounds_plan", np.empty(0))
        is_number = found.dtype == np.float64 and found.shape == (3,)
        if not is_number or not ((found >= 0) & (found <= MOST_COUNTED)).all() or found[1] > found[2] or found[2] < 1:
            raise ValueError(f"plan of rounds: found {found}, expected a factor and two numbers of tokens")
        if self._num_rounds == 0:  # other texts' rounds on this machine tell more than this text's elsewhere
            _, self._alike, self._compared = found.tolist()  # another machine's slowness says nothing of this one's

    def _tokens(self, chain_length: int) -> float:
        """Return the expected tokens of a step, the bonus token included."""
        alike, depths = self._alike / self._compared, chain_length + 1
        return (1 - alike**depths) / (1 - alike) if alike < 1 else float(depths)

    def _texts(self, lengths: np.ndarray) -> _Texts:
        near = self._costs.own_seconds(FEW_ROWS, np.minimum(lengths, MOST_ENTRIES))
        all_keys = self._costs.own_seconds(FEW_ROWS, lengths)
        beyond = float((all_keys[:, 1] - near[:, 1]).clip(min=0.0).sum())
        return _Texts(len(lengths), all_keys.sum(axis=0).tolist(), near.sum(axis=0).tolist(), beyond)

    def _forward_seconds(self, texts: _Texts, num_rows: int) -> float:
        return self._costs.shared_seconds(num_rows * texts.number) + texts.all_keys[num_rows]

    def _round_seconds(self, texts: _Texts, num_nodes: int) -> float:
        """Return the seconds of one round: some entries are read exactly, all others scanned."""
        exact = self._costs.shared_seconds((num_nodes + 1) * texts.number) + texts.entries[num_nodes + 1]
        share = SCAN_SHARE * (1 + ROW_SHARE * num_nodes)
        beside = ROUND_SECONDS + ROW_SECONDS * num_nodes * texts.number
        beside += TREE_SECONDS if num_nodes else 0.0
        return beside + exact + share * texts.beyond
