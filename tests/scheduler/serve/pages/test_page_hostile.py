"""The page escapes hostile texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.scheduler.serve.pages.page_responses import FOLDER
from tests.metrics.report_parts import finish
from tests.metrics.test_report_page import Elements
from tests.scheduler.serve.pages.page_parts import HOSTILE, app_of, client_of, new_batch, service_of, submit, token_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
TAGS = re.compile(
    "html|head|meta|link|script|title|body|a|header|p|form|input|span|button|main|h1|h2|section|div|label|small|select|"
    "option|code|textarea|progress|table|thead|tr|th|tbody|td|bdi|details|summary|nav|dl|dt|dd|figure|figcaption|"
    "blockquote"
)
AT_LEAST = 4.5  # of contrast, for text


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return client_of(app_of(tmp_path))


def test_hostile_words_stay_words(client: TestClient) -> None:
    service = service_of(client)
    rejects = [Reject(number, word, f"found {word}") for number, word in enumerate(HOSTILE, 1)]
    batches = [new_batch(service, word, {word[:64]: word, "to": "x"}) for word in HOSTILE]
    batches.append(new_batch(service, metadata={"name": HOSTILE[0]}))
    run, records = submit(batches[0], HOSTILE, rejects)
    finish(run, records[0], [], 20.0, HOSTILE[0])
    pages = [client.get("/").text, *(client.get(f"/batches/{batch.id}").text for batch in batches)]
    said = {
        "endpoint": HOSTILE[1],
        "window": HOSTILE[1],
        "metadata": HOSTILE[3] + "\x1b[31m",
        "form_token": token_of(client),
    }
    pages.append(client.post("/", data=said, files={"file": (HOSTILE[1], b"{}")}).text)
    pages.append(client.get(f"/batches/{HOSTILE[3].replace('/', '')}").text)
    for page in pages:
        found = Elements(page)
        assert [tag for tag, _ in found.elements if not TAGS.fullmatch(tag)] == []
        assert [script for tag, script in found.elements if tag == "script"] == [{"src": "/page.js", "defer": ""}]
        assert not [name for _, names in found.elements for name in names if name.startswith("on") or name == "style"]
        assert all(link.startswith(("/", "?", "#")) for link in found.values("href") + found.values("action"))
        assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", found.text) is None
    for word in HOSTILE[:6]:
        assert word in Elements(pages[0]).text
        assert Elements(pages[1]).text.count(f"found {word}") == 1
    assert r"a\u202egpj.exe\x00\x1b[31m" in Elements(pages[1]).text


@pytest.mark.parametrize("path", ["/", "/login", "/batches/none", "/page.css", "/page.js", "/icon.svg", "/?after=x"])
def test_headers_are_strict_everywhere(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert headers["Content-Security-Policy"] == POLICY
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/batches/{}/report", "/v1/batches/{}/report"])
def test_no_script_runs_in_a_report(client: TestClient, path: str) -> None:
    batch = new_batch(service_of(client))
    submit(batch, HOSTILE)
    headers = client.get(path.format(batch.id)).headers
    assert headers["Content-Security-Policy"].startswith(
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    )
    assert headers["Content-Security-Policy"].endswith("frame-ancestors 'none'; sandbox")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_colours_can_be_told_apart() -> None:
    css = (FOLDER / "assets" / "page.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", css, re.S):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for text in ("ink", "muted", "accent", "good", "bad"):
            for ground in ("card", "page"):
                assert contrast(colours[text], colours[ground]) >= AT_LEAST, (text, ground)
        assert contrast(colours["on-accent"], colours["accent"]) >= AT_LEAST
        assert contrast(colours["ink"], colours["band"]) >= AT_LEAST
        for ground in (colours["card"], colours["page"]):
            assert contrast(colours["edge"], ground) >= 3
        assert contrast(colours["accent"], colours["track"]) >= 3


def contrast(one: str, other: str) -> float:
    """Return the contrast by WCAG."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
