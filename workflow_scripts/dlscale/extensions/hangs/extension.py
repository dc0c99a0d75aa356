"""What a process that makes no progress is doing; the watchdog asks this extension."""

PROVIDES = {
    "waiting_place": "dlscale.extensions.hangs.hangs.waiting_place",
    "stacks": "dlscale.extensions.hangs.hangs.stacks",
}
