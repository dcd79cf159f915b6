"""The page has no fetches, scripts or unescaped texts, and working links."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from click.testing import CliRunner, Result

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.report.page_text import amount
from swiftbatch.scheduler.cli import main
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.metrics.report_parts import (
    BEGIN,
    ENDED,
    attempt,
    facts_of,
    finish,
    new_run,
    page_of,
    preempted_run,
    record,
    timeline,
)

pytestmark = pytest.mark.long

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><link rel=stylesheet href=//evil.example/x.css>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "a\u202egpj.exe\x00\x1b[31m\udc80",
    "&lt;b&gt; ]]> <!--",
)

TAGS = re.compile(
    "html|head|meta|link|title|style|body|header|main|h1|h2|span|p|nav|a|small|b|section|div|i|table|thead|tbody|tr|th|td|bdi|"
    "details|summary|blockquote|ul|li|code|dl|dt|dd|svg|defs|g|path|use|text|clippath|rect"
)
ATTRIBUTES = re.compile(
    "lang|charset|name|content|http-equiv|rel|href|class|style|id|title|data-name|role|tabindex|aria-label|"
    "xmlns|xmlns:xlink|xlink:href|version|viewbox|width|height|d|x|y|transform|clip-path"
)


FOLDER = "a run: 100%25 #1?\udcff"  # links must quote these characters


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def hostile_run(uri: str) -> Run:
    run = new_run(uri)
    jobs = [record(word.encode(errors="replace").decode(), prompt=f"tell of {word}"[:-1] + "!") for word in HOSTILE]
    run.add_jobs(jobs)
    for word, job in zip(HOSTILE[:6], jobs, strict=False):
        finish(run, job, [attempt(1, word, BEGIN, timeline(BEGIN, 9.0, 0, 1000))], BEGIN + 9, f"And {word} was all.")
    for word, job in zip(HOSTILE[6:], jobs[6:], strict=True):
        run.write_error(job.job_id, error_line(job, "attempts_failed", f"worker said {word}"))
    run.write_rejects([Reject(number, word, f"found {word}") for number, word in enumerate(HOSTILE, 1)])
    return run


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["report", *args])


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    page = Elements(page_of(hostile_run(str(tmp_path))))
    assert [tag for tag, _ in page.elements if not TAGS.fullmatch(tag)] == []
    assert [name for _, found in page.elements for name in found if not ATTRIBUTES.fullmatch(name)] == []
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", page.text) is None
    shown = [word.replace("\x00\x1b[31m\udc80", r"\x00\x1b[31m\udc80") for word in HOSTILE]
    for word in shown:
        assert page.text.count(f"found {word}") == 1
    for word in HOSTILE[:6]:
        assert page.text.count(f"And {word} was all.") == 1
        assert any(word in title for title in page.values("title"))
    for word in shown[6:]:
        assert f"worker said {word}" in page.text


def test_words_that_have_no_utf8_form_are_written_all_the_same(tmp_path: Path) -> None:
    run = hostile_run(str(tmp_path / "run"))
    page = tmp_path / "report.html"
    assert invoke(run.store.uri, "--output", str(page)).exit_code == 0
    assert "gpj.exe" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [preempted_run, hostile_run])
def test_the_page_asks_for_nothing_and_runs_nothing(make: type[Run], tmp_path: Path) -> None:
    text = page_of(make(str(tmp_path)))
    page = Elements(text)
    policies = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    ]
    assert not {"src", "srcset", "action", "data", "background"} & {n for _, found in page.elements for n in found}
    assert not {"script", "iframe", "object", "embed", "img", "form", "base"} & {tag for tag, _ in page.elements}
    assert [link["href"] for tag, link in page.elements if tag == "link"] == ["data:,"]
    links = [link["href"] for tag, link in page.elements if tag == "a" and "href" in link]
    assert links
    assert all(link.startswith("#") or (":" not in link and not link.startswith("//")) for link in links)
    assert all(use.startswith("#") for use in page.values("xlink:href"))
    styles = " ".join(
        [*page.values("style"), *page.values("clip-path"), *re.findall(r"<style>(.*?)</style>", text, re.S)]
    )
    assert "@import" not in styles
    assert set(re.findall(r"url\((.)", styles)) <= {"#"}


def test_a_run_with_a_price_says_what_it_and_each_job_cost(tmp_path: Path) -> None:
    run = preempted_run(str(tmp_path))
    assert "cost" not in page_of(run)
    had = {"worker_seconds": 7200.0, "price_per_worker_hour": 50.0, "num_generated_tokens": 8000}
    priced = ENDED.model_copy(update=had)
    page, job = page_of(run, priced), facts_of(run).jobs[0]
    assert "<small>cost</small><b>100.00</b><small>2 worker hours; 12,500.00 per million tokens" in page
    assert f'data-name="cost">{amount(100 * job.num_tokens / 8000)}</td>' in page


def test_every_reference_inside_the_page_has_its_target_once(tmp_path: Path) -> None:
    page = Elements(page_of(hostile_run(str(tmp_path))))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    inside = [href[1:] for href in [*page.values("href"), *page.values("xlink:href")] if href.startswith("#")]
    clips = [clip.removeprefix("url(#").removesuffix(")") for clip in page.values("clip-path")]
    assert set(inside) | set(clips) <= set(ids)


def test_the_page_has_one_main_part_and_the_keyboard_reaches_what_scrolls(tmp_path: Path) -> None:
    page = Elements(page_of(hostile_run(str(tmp_path))))
    assert [tag for tag, _ in page.elements].count("main") == 1
    scrolling = [values for _, values in page.elements if values.get("class") in ("wide", "gantt")]
    assert scrolling
    assert all(values["tabindex"] == "0" and values["aria-label"] for values in scrolling)


def test_links_lead_to_the_files_of_the_run_wherever_the_page_lies(tmp_path: Path) -> None:
    run = hostile_run(str(tmp_path / FOLDER))
    for folder in (tmp_path, tmp_path / FOLDER, tmp_path / "elsewhere" / "deep"):
        folder.mkdir(parents=True, exist_ok=True)
        page = Elements(page_of(run, folder=str(folder)))
        links = [
            link["href"] for tag, link in page.elements if tag == "a" and not link.get("href", "#").startswith("#")
        ]
        assert len(links) == 6 + 2 + 2  # the failed ones are in two tables
        files = [
            json.loads((folder / os.fsdecode(unquote_to_bytes(link))).read_text().splitlines()[0]) for link in links
        ]
        assert {line["custom_id"] for line in files} == {job.job.custom_id for job in run.jobs()}


def test_a_job_says_which_line_of_the_file_is_its_result(tmp_path: Path) -> None:
    run = preempted_run(str(tmp_path / "run"))
    page = page_of(run)
    for job in run.jobs():
        told = re.search(rf"with the id <code>(\S*{job.job_id})</code> in <code>(\S+)</code>", page)
        lines = (tmp_path / "run" / told[2]).read_text().splitlines()
        [line] = [line for line in lines if line.startswith(json.dumps({"id": told[1]})[:-1])]
        assert json.loads(line)["custom_id"] == job.job.custom_id


def test_colours_follow_the_readers_choice(tmp_path: Path) -> None:
    page = page_of(preempted_run(str(tmp_path)))
    light, dark = re.findall(r":root \{(.*?)\}", page, re.S)
    assert set(re.findall(r"--\w+(?=:)", dark)) == set(re.findall(r"--\w+(?=:)", light))
    curves = "".join(re.findall(r"<svg .*?</svg>", page, re.S))
    assert set(re.findall(r"#[0-9a-f]{6}\b", curves)) <= {"#ffffff"}  # the background, which is not painted
    used = set(re.findall(r"var\((--\w+)", page))
    assert used - {"--w", "--tone"} <= set(re.findall(r"--\w+(?=:)", light))


def test_the_command_writes_the_page_and_says_so(tmp_path: Path) -> None:
    run, page = preempted_run(str(tmp_path / "run")), tmp_path / "page.html"
    result = invoke(run.store.uri, "--output", str(page))
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"report of 2 jobs: {page} (")
    assert 'href="run/results/' in page.read_text()


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    run = preempted_run(str(tmp_path / "run"))
    for args, problem in (
        ([str(tmp_path)], "no run at"),
        ([run.store.uri, "--output", "/proc/x.html"], "/proc/x.html"),
        ([run.store.uri, "--output", str(tmp_path)], "directory"),
    ):
        result = invoke(*args)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert problem in result.stderr


def test_a_run_on_an_object_store_is_reported_without_links(s3_uri: str) -> None:
    run = preempted_run(s3_uri)
    waiting = record("waiting")
    run.add_jobs([waiting])
    checkpoints = CheckpointStore.of(run)
    number = claim(checkpoints, waiting.job_id, "w1")
    checkpoints.write_tokens(waiting.job_id, number, np.arange(30, dtype=np.uint32))
    text = page_of(Run.open(s3_uri))
    page = Elements(text)
    assert f"results/segments/{run.jobs()[0].job_id}.seg" in page.text
    assert [link for link in page.values("href") if not link.startswith(("#", "data:"))] == []
    assert "30 <small>of 1,000</small>" in text
