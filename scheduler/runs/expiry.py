"""End the jobs of a run whose time is up."""

from __future__ import annotations

from swiftbatch.jobs.run.results import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.hold import Hold

EXPIRED = "batch_expired"  # the error code of a job that did not end in time, as OpenAI has it
MESSAGE = "This request could not be executed before the completion window expired."


def expire_jobs(run: Run) -> None:
    """Give all unfinished jobs an error. Raises RunTakenError while a driver is at work, RunError, StoreError."""
    with Hold(run, may_take_over=True) as hold:
        finished, failed = run.ended()
        unfinished = [record for record in run.jobs() if record.job_id not in finished | failed]
        run.set_damaged_aside([record.job_id for record in unfinished])
        for record in unfinished:
            run.write_error(record.job_id, error_line(record, EXPIRED, MESSAGE))
        run.write_output(hold.epoch.check)
        hold.end("finished")
