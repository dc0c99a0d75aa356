"""Extension: the loader `dali` (NVIDIA DALI)."""

from dlscale.core.registry import LoaderPlace

LOADERS = {
    "dali": LoaderPlace(
        "dlscale.extensions.dali.loader",
        settings="dlscale.extensions.dali.settings.DaliLoader",
        prepare="dlscale.extensions.dali.prepare.prepare",
    ),
}
