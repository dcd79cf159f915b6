"""The hosts that batches may name for their messages, as `--webhook-hosts` says them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.serve.hooks.addresses import Reach

NAME = re.compile(r"(\*\.)?[A-Za-z0-9._:-]{1,253}")
ALLOWED: tuple[Reach, ...] = ("private", "loopback")
PUBLIC: frozenset[Reach] = frozenset({"public"})
EXPECTED = "expected hosts with commas between them, as hooks.example.com,*.example.org,10.0.0.5=private"


class WebhookHostsError(UserError):
    """`--webhook-hosts` can't be used."""


@dataclass(frozen=True)
class WebhookHosts:
    """Names, and where their addresses may lead. `*.example.org` stands for all names below that one."""

    reaches: dict[str, frozenset[Reach]]

    @classmethod
    def parse(cls, text: str) -> WebhookHosts:
        """Parse the value of `--webhook-hosts`. Raises WebhookHostsError."""
        reaches: dict[str, frozenset[Reach]] = {}
        for word in filter(None, map(str.strip, text.split(","))):
            name, equals, reach = word.partition("=")
            if NAME.fullmatch(name) is None or (equals and reach not in ALLOWED):
                raise WebhookHostsError(
                    f"--webhook-hosts: found {word!a}, {EXPECTED} (behind '=': {' or '.join(ALLOWED)})"
                )
            also = [each for each in ALLOWED if each == reach]
            reaches[name.lower()] = reaches.get(name.lower(), PUBLIC).union(also)
        return cls(reaches)

    def allowed(self, host: str) -> frozenset[Reach]:
        """The kinds of addresses that a host may have; empty for a host that may not be named."""
        name = host.lower()
        parents = [f"*.{name.split('.', number)[-1]}" for number in range(1, name.count(".") + 1)]
        return next((self.reaches[each] for each in [name, *parents] if each in self.reaches), frozenset())
