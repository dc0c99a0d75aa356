# What a call shows between and beside Snakemake's messages.
from snakemake.logging import logger
from snakemake_logger_plugin_dlscale import TOLD, LogHandler


def tell(*lines):
    """Show lines between those that Snakemake logs, whichever logger shows them."""
    if lines:
        logger.info("\n".join(lines), extra={TOLD: True})


def displays():
    """Return the logger of our profiles, if it shows the progress of this call and not Snakemake's own messages."""
    handlers = workflow.logger_manager.get_log_handlers()
    return [each for each in handlers if isinstance(each, LogHandler) and not each.is_verbose]


def show_all(**_):
    """Show Snakemake's own messages."""
    for display in displays():
        display.is_verbose = True
