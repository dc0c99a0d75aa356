"""Extension: details of loaders for `dlscale measure --loader`, and layout of datasets for `dlscale doctor`."""

#: Environment variable: if set, the program's processes watch their loaders.
VARIABLE = "DLSCALE_LOADER"

HOOKS = {"dlscale.extensions.loading.inside": VARIABLE}

PROVIDES = {
    "LoaderWatch": "dlscale.extensions.loading.report.LoaderWatch",
    "loader_cause": "dlscale.extensions.loading.report.cause",
}

PROBES = {"layout": "dlscale.extensions.loading.layout.probe_layouts"}

SECTIONS = {"loading": "dlscale.extensions.loading.report.section"}
