"""The log-probabilities of running jobs, in files beside their token logs: written before these, read with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from swiftbatch.jobs.checkpoints.checked_files import CheckedFiles
from swiftbatch.jobs.checkpoints.logprob_spans import LogprobSpan, WrittenSpans, decode_span, encode_span, span_name
from swiftbatch.jobs.checkpoints.token_log import TokenIds, TokenLog
from swiftbatch.jobs.identity import Identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store

NAME = re.compile(r"logprobs-([0-9]+)-([0-9]+)-[0-9]+\.bin")


class LogprobFiles:
    """The log-probability files of one run. `folders` are those of a job's attempts. Methods raise `StoreError`."""

    def __init__(self, store: Store, files: CheckedFiles) -> None:
        self._store = store
        self._files = files

    def write(
        self, folder: str, written: WrittenSpans, log: TokenLog, logprobs: TokenLogprobs, identity: Identity
    ) -> int:
        """Write the log-probabilities not `written` yet; `logprobs` are of all tokens. Returns bytes written."""
        num_tokens = len(log.token_ids)
        if num_tokens <= written.end:
            return 0
        start = written.start_of_next(num_tokens)
        data = encode_span(log.token_ids, logprobs, identity, start)
        name = span_name(start, num_tokens, len(log.rewinds))
        self._store.write(f"{folder}/{name}", data)
        written.add(start, num_tokens, name)
        return len(data)

    def drop_replaced(self, folder: str, written: WrittenSpans) -> None:
        """Remove the files whose place others have taken."""
        while written.replaced:
            self._store.delete(f"{folder}/{written.replaced[-1]}")
            written.replaced.pop()

    def read(self, folders: Sequence[str], token_ids: TokenIds, num_top: int, identity: Identity) -> TokenLogprobs:
        """Read the log-probabilities of an output's first tokens, as many as the files hold without a gap."""
        decode = partial(decode_span, identity=identity)
        places = sorted(self._places(folders), key=lambda place: place[:2])
        spans: dict[str, LogprobSpan | None] = {}
        parts: list[TokenLogprobs] = []
        num_found = 0
        while num_found < len(token_ids):
            for _, path in self._reaching(places, num_found):
                if path not in spans:
                    spans[path] = self._files.decoded(path, self._store.read(path), decode)
                span = spans[path]
                if span is None or span.logprobs.num_top != num_top or span.start > num_found:
                    continue  # torn, or another file under this name
                end = span.start + span.num_agreeing(token_ids)
                if end > num_found:
                    parts.append(span.logprobs.part(num_found - span.start, end - span.start))
                    num_found = end
                    break
            else:
                break
        return TokenLogprobs.joined(parts, num_top)

    def _places(self, folders: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        """First token, end and path of each file."""
        for folder in folders:
            for name in self._store.list(folder):
                if found := NAME.fullmatch(name):
                    yield int(found[1]), int(found[2]), f"{folder}/{name}"

    def _reaching(self, places: Sequence[tuple[int, int, str]], num_found: int) -> list[tuple[int, str]]:
        """The files that go on behind the first tokens, the farthest first."""
        reaching = [(end, path) for start, end, path in places if start <= num_found < end]
        return sorted(reaching, reverse=True)
