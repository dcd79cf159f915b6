"""Options of the server reach the drivers of its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.commands.serve import _driver_options, serve
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches.service import Service
from tests.scheduler.commands.command_parts import refusal
from tests.scheduler.serve.api_parts import client_of


def test_an_option_that_may_be_repeated_reaches_each_driver_as_often() -> None:
    given = ["--lora", "a=x", "--lora", "b=org/y", "--engine-option", "nodes=8", "--engine", "token-recycling"]
    options = _driver_options(serve.make_context("serve", ["--runs", "folder", *given]))
    assert {"--lora=a=x", "--lora=b=org/y"} <= {*options.of_run}
    assert "--engine-option=nodes=8" in options.of_start


def test_adapters_are_listed_as_models_with_a_parent(tmp_path: Path) -> None:
    context = serve.make_context(
        "serve", ["--runs", "folder", "--model", "org/large", "--lora", "a=x", "--lora", "b=y"]
    )
    service = Service(Store(str(tmp_path)), ServeOptions(), _driver_options(context), lambda: None, print)
    client = client_of(service)
    found = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in found] == [("org/large", None), *((n, "org/large") for n in "ab")]
    assert client.get("/v1/models/b").json() == found[2]
    assert client.get("/v1/models/c").status_code == 404


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "/nowhere"), "model /nowhere: neither"),
        (("--lora", "a=/nowhere"), "adapter a: /nowhere is no folder here"),
        (("--lora", "a=/here", "--lora", "a=/there"), "--lora: found a twice"),
        (("--device", "cpu", "--gpus-per-worker", "2"), "--gpus-per-worker 2: "),
    ],
    ids=lambda said: said[0] if isinstance(said, tuple) else "",
)
def test_what_no_batch_could_run_with_is_refused_before_the_server_starts(options: tuple[str, ...], said: str) -> None:
    """Else the first batch would tell of it, hours later."""
    assert said in refusal("serve", "--runs", "folder", *options)
