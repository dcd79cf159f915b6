from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.pages import page_routes
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from tests.scheduler.driving import wait_until
from tests.scheduler.serve.pages.browser_parts import IS_INSTALLED, Browser, browsing
from tests.scheduler.serve.pages.page_parts import HOSTILE, app_of, in_progress, listening, new_batch

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs chromium and chromedriver")

TOO_WIDE = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
DROP = """
const data = new DataTransfer();
data.items.add(new File(["{}\\n"], arguments[0]));
document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
document.querySelector("#upload button").click();
"""
HAS_RUN = "return window.hasRun ?? false"
TRY_TO_RUN = """
const script = document.createElement("script");
script.textContent = "window.hasRun = true";
document.body.append(script);
document.body.insertAdjacentHTML("beforeend", '<img src="data:," onerror="window.hasRun = true">');
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    app = app_of(tmp_path)
    with listening(app) as url:
        yield app.state.service, url


def hostile_batch(service: Service) -> Batch:
    for word in HOSTILE:
        new_batch(service, word, {"note": word})
    return in_progress(service, HOSTILE)


def test_hostile_words_run_nothing_and_fit_every_screen(service: tuple[Service, str], browser: Browser) -> None:
    batch = hostile_batch(service[0])
    for path in ("/", f"/batches/{batch.id}", f"/batches/{batch.id}/report", f"/v1/batches/{batch.id}/report"):
        for width in (390, 1200):
            browser.show(width, is_dark=width == 390)
            browser.open(f"{service[1]}{path}")  # an alert would make the next command fail
            wait_until(lambda: not browser.run(TOO_WIDE))  # a busy machine first lays it out at the old width
            assert HOSTILE[0] in browser.run("return document.body.textContent")
    assert browser.complaints() == []
    browser.open(service[1])
    browser.run(TRY_TO_RUN)  # in case a text was not escaped
    complaints: list[str] = []
    wait_until(lambda: complaints.extend(browser.complaints()) or len(complaints) >= 2 or browser.run(HAS_RUN))
    assert not browser.run(HAS_RUN)


OPEN_AT_ONCE = """
new MutationObserver((changes, observer) => {
  const cancel = document.querySelector("details.cancel");
  if (cancel) { cancel.open = true; observer.disconnect(); }
}).observe(document, {childList: true, subtree: true});
"""


def test_what_was_opened_before_the_script_ran_stays_open(
    service: tuple[Service, str], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "REFRESH_SECONDS", 0.3)
    in_progress(service[0])
    early = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=OPEN_AT_ONCE)
    browser.open(f"{service[1]}/")
    browser.cdp("Page.removeScriptToEvaluateOnNewDocument", **early)
    new_batch(service[0])
    wait_until(lambda: not browser.run("return document.getElementById('news').hidden"))  # it was refreshed
    assert browser.run("return document.querySelector('details.cancel').open")


def test_figures_change_while_one_looks(
    service: tuple[Service, str], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "REFRESH_SECONDS", 0.3)
    batch = in_progress(service[0])
    browser.open(f"{service[1]}/")
    browser.run("document.querySelector('details.cancel').open = true")
    assert "1,400 of at most" in browser.run("return document.body.textContent")
    run = Run.open(batch.store.uri)
    progress = run.progress()
    run.write_progress(progress.model_copy(update={"num_generated_tokens": 1500, "updated": time.time()}))
    wait_until(lambda: "1,500 of at most" in browser.run("return document.body.textContent"))
    assert browser.run("return document.querySelector('details.cancel').open")
    new_batch(service[0])
    wait_until(lambda: not browser.run("return document.getElementById('news').hidden"))


def test_a_file_is_dropped_and_becomes_a_batch(service: tuple[Service, str], browser: Browser) -> None:
    browser.open(service[1])
    browser.run("document.getElementById('window').value = '1m'; document.getElementById('upload').noValidate = true")
    browser.run("document.getElementById('metadata').value = 'no colon'")
    browser.run(DROP, HOSTILE[1])
    wait_until(lambda: "expected a name" in browser.run("return document.getElementById('upload-problem').textContent"))
    browser.run("document.getElementById('metadata').value = 'name: Dropped'")
    browser.run(DROP, HOSTILE[1])
    wait_until(lambda: browser.run("return location.pathname").startswith("/batches/"))
    [batch] = service[0].batches.all()
    assert browser.run("return location.pathname") == f"/batches/{batch.id}"
    assert batch.record.metadata == {"name": "Dropped"}
    browser.run("document.querySelector('details.cancel').open = true; document.querySelector('.danger').click()")
    wait_until(lambda: batch.cancellation)
    wait_until(lambda: "cancelling" in browser.run("return document.body.textContent"))
