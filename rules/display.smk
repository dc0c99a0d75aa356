# Print dlscale's messages through Snakemake's log, and control which of Snakemake's own messages are shown.
from snakemake.logging import logger
from snakemake_logger_plugin_dlscale import TOLD, LogHandler


def tell(*lines):
    """Print lines through Snakemake's log, so that every logger shows them."""
    if lines:
        logger.info("\n".join(lines), extra={TOLD: True})


def displays():
    """Return dlscale's log handlers that show progress instead of Snakemake's own messages."""
    handlers = workflow.logger_manager.get_log_handlers()
    return [each for each in handlers if isinstance(each, LogHandler) and not each.is_verbose]


def show_all(**_):
    """Show Snakemake's own messages."""
    for display in displays():
        display.is_verbose = True
