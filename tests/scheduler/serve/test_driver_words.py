"""Options of the server reach the drivers of its batches."""

from __future__ import annotations

from swiftbatch.scheduler.commands.serve import _driver_options, serve


def test_an_option_that_may_be_repeated_reaches_each_driver_as_often() -> None:
    given = ["--lora", "a=x", "--lora", "b=org/y", "--engine-option", "nodes=8", "--engine", "token-recycling"]
    options = _driver_options(serve.make_context("serve", ["--runs", "folder", *given]))
    assert {"--lora=a=x", "--lora=b=org/y"} <= {*options.of_run}
    assert "--engine-option=nodes=8" in options.of_start
