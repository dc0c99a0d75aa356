"""Snakemake logger plugin for tests, which writes each job as a line of JSON to the file named by $JOBS_LOG."""

import json
import os

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent


class LogHandler(LogHandlerBase):
    """Log handler that is added to the usual terminal output."""

    writes_to_stream = writes_to_file = needs_rulegraph = False
    has_filter = has_formatter = True

    def emit(self, record):
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            job = {
                "rule": record.rule_name,
                "wildcards": dict(record.wildcards or {}),
                "reason": record.reason,
                "message": record.rule_msg,
                "command": record.shellcmd,
                # Leave out resources without a value, such as sizes that are only known when the job starts.
                "resources": {key: value for key, value in record.resources.items() if isinstance(value, int | str)},
            }
            with open(os.environ["JOBS_LOG"], "a", encoding="utf-8") as file:
                file.write(json.dumps(job) + "\n")
