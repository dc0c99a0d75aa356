"""What processes that make no progress are doing; the watchdog, `dlscale measure` and `dlscale explain` use this."""

PROVIDES = {
    "waiting_place": "dlscale.extensions.hangs.hangs.waiting_place",
    "hang_of": "dlscale.extensions.hangs.record.hang_of",
    "stacks": "dlscale.extensions.hangs.hangs.stacks",
}
