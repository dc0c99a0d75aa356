"""Snakemake logger plugin `dlscale`: the terminal output of a call of the workflow. Every profile uses it.

A call shows progress, warnings, and messages of the rules; a dry run also shows the number of jobs. With `-p`, `-q`,
`--verbose` or `--debug-dag`, a call shows Snakemake's own messages instead of its progress. Snakemake's log file always
contains Snakemake's messages, but it contains the commands of jobs only after `-p`.

Snakemake imports every logger plugin at each start. Therefore this plugin imports modules of dlscale only when needed.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.live import Live

    from dlscale.preflight.status import CallProgress, Job

#: Attribute of the log records that the rules write.
TOLD = "told_by_dlscale"

#: Seconds between two updates of the progress, and, without a terminal, minimum seconds between two lines.
LOOK_EVERY, LINE_EVERY = 0.5, 20.0
#: Minimum time between two lines, as a fraction of the call's time so far: a call of a day prints a few hundred lines.
LINE_SHARE = 0.01


class LogHandler(LogHandlerBase):
    """Handler of all records of Snakemake's log; Snakemake calls `emit` in a separate thread."""

    writes_to_stream = True
    writes_to_file = needs_rulegraph = False
    has_filter = has_formatter = False  # Snakemake's own filter and formatter apply to its messages

    def __post_init__(self) -> None:
        from rich.console import Console

        settings = self.common_settings
        self.console = Console(stderr=True)
        #: Console for Snakemake's own messages: standard output in a dry run, else standard error.
        self.snakemakes = Console(stderr=not settings.stdout)
        #: Whether Snakemake's own messages are shown.
        self.is_verbose = bool(settings.printshellcmds or settings.quiet or settings.verbose or settings.debug_dag)
        self.progress: CallProgress | None = None
        self._failed: set[int] = set()
        self._after_job = self._counted = False
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def expect(self, jobs: Iterable[Job]) -> None:
        """Show the progress of `jobs`, which are about to begin, until the call ends."""
        from dlscale.preflight.status import CallProgress

        if self.is_verbose or self._watcher:
            return
        self.progress = CallProgress(time.time(), list(jobs))
        (watcher := threading.Thread(target=self._watch, args=[self.progress], daemon=True)).start()
        self._watcher = watcher  # not before: without memory, no thread starts

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, and count the jobs that failed."""
        from dlscale.core import interrupt

        event, told = getattr(record, "event", None), getattr(record, TOLD, False)
        if event == LogEvent.JOB_ERROR:
            self._failed.add(record.jobid)
        elif event == LogEvent.JOB_STARTED:  # the job starts for the first time, or again after a failure
            self._failed.difference_update(record.jobs)
        if self.progress:
            self.progress.failed = len(self._failed)
        # After Ctrl-C, Snakemake reports jobs as failed even if they saved a checkpoint and ended.
        if told or (not interrupt.seen and (self.is_verbose or self._is_wrong(record, event))):
            self._print(record, event, self.console if told else self.snakemakes)
        elif (
            event == LogEvent.JOB_ERROR and record.rule_msg and not interrupt.seen
        ):  # a message of the executor, such as Slurm's executor
            self._show(f"{record.rule_name}, job {record.jobid}: {record.rule_msg}", self.console, "red")

    def close(self) -> None:
        """End the display."""
        self._ended.set()
        if self._watcher:
            self._watcher.join()
        super().close()

    def _is_wrong(self, record: logging.LogRecord, event: LogEvent | None) -> bool:
        """Return whether to print a record that Snakemake wrote.

        The result is true for warnings, for errors that the rules do not explain at the end of the call, and in a dry
        run for the first record with the number of jobs.
        """
        if event == LogEvent.RUN_INFO:  # a dry run repeats this record at its end
            first, self._counted = not self._counted, True
            return first and bool(self.common_settings.dryrun)
        if event == LogEvent.ERROR:  # Snakemake writes this record for a failed job, and again for the call
            return record.exception != "RuleException" and not self._failed
        if self._failed and record.module == "job_scheduler":
            return False  # "Exiting because a job execution failed": the failed job is already on the terminal
        return event is None and record.levelno >= logging.WARNING

    def _print(self, record: logging.LogRecord, event: LogEvent | None, console: Console) -> None:
        text = self.format(record).rstrip("\n")
        if text in ("", "None"):
            return
        if event == LogEvent.JOB_INFO and not self._after_job:
            text = f"\n{text}"
        self._after_job = event == LogEvent.JOB_INFO
        colour = "red" if record.levelno >= logging.ERROR or text.startswith(("FAILED", "FAIL ")) else ""
        self._show(text, console, colour)

    def _show(self, text: str, console: Console, colour: str = "") -> None:
        try:
            console.print(text, style=colour, markup=False, highlight=False, soft_wrap=True)
        except (BrokenPipeError, SystemExit):  # rich replaces BrokenPipeError with SystemExit
            if not self._ended.is_set():
                self._ended.set()
                # End the call, because the reader of its output is gone, as after `... | head`.
                os.kill(os.getpid(), signal.SIGINT)

    def _watch(self, progress: CallProgress) -> None:
        """Draw the progress on a terminal twice a second, or print lines, until the call ends."""
        from rich.live import Live

        from dlscale.preflight.status import progress_bar, progress_line

        bar: Live | None = Live(console=self.console, auto_refresh=False, transient=True)
        if not self.console.is_terminal:
            bar = None
        last, began = -math.inf, time.monotonic()
        try:
            while not self._ended.wait(LOOK_EVERY):
                progress.look(time.time())
                now = time.monotonic()
                if bar:
                    bar.start()
                    bar.update(progress_bar(progress, time.time()), refresh=True)
                elif now - last >= max(LINE_EVERY, LINE_SHARE * (now - began)):
                    last = now
                    self._show(progress_line(progress, time.time()), self.console)
        finally:
            if bar:
                bar.stop()
