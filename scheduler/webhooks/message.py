"""A message as Standard Webhooks has it: what happened, under an id of its own, and signed at every try."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class WebhookMessage:
    """Something that has happened; `data` says what, without any text of prompts and outputs."""

    kind: str  # run.ended or job.ended
    data: Mapping[str, Any]
    moment: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def id(self) -> str:
        """The message's id: the same whenever the same is told again, by whichever driver."""
        identity = json.dumps([self.kind, self.data], sort_keys=True)
        return f"msg_{hashlib.sha256(identity.encode()).hexdigest()[:32]}"

    def body(self) -> bytes:
        moment = datetime.fromtimestamp(self.moment, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"type": self.kind, "timestamp": moment, "data": self.data}).encode()

    def headers(self, body: bytes, key: bytes | None) -> dict[str, str]:
        """The headers of a try that is made now; without a key there is no signature."""
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "swiftbatch",
            "webhook-id": self.id,
            "webhook-timestamp": timestamp,
        }
        if key is not None:
            signed = b".".join([self.id.encode(), timestamp.encode(), body])
            signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
            headers["webhook-signature"] = f"v1,{signature}"
        return headers
