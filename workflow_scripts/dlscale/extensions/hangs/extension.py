"""Extension: find where processes hang, for the watchdog, `dlscale measure` and `dlscale explain`."""

HOOKS = {"dlscale.extensions.hangs.inside": "DLSCALE_HANG_AFTER"}

PROVIDES = {
    "waiting_place": "dlscale.extensions.hangs.hangs.waiting_place",
    "hang_of": "dlscale.extensions.hangs.record.hang_of",
    "stacks": "dlscale.extensions.hangs.hangs.stacks",
}
