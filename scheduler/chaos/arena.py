"""Where a chaos run takes place: a cluster of its own on this machine, or the user's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from scheduler.chaos.local_cluster import local_cluster
from scheduler.chaos.options import ChaosOptions
from scheduler.chaos.plan import Kind
from scheduler.chaos.victims import Way, local_ways, remote_ways


@dataclass(frozen=True)
class Arena:
    """A running cluster, the environment of those who may talk to it, and the ways to kill something on it."""

    address: str
    environment: Mapping[str, str]
    ways: Mapping[Kind, Way]


@contextlib.contextmanager
def open_arena(options: ChaosOptions, random: Random, show: Callable[[str], None]) -> Iterator[Arena]:
    """The cluster at the user's address; without one, a cluster that is ended with the context.

    Raises ChaosError if that one does not start.
    """
    if options.address is not None:
        yield Arena(options.address, os.environ, remote_ways(options.address, random))
        return
    show("starting a Ray cluster of its own on this machine")
    with local_cluster(num_cpus=options.num_workers) as cluster:
        yield Arena(cluster.address, cluster.environment, local_ways(cluster, random))
