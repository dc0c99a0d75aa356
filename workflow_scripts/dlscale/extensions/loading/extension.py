"""Details of loaders: `dlscale measure --loader`, and the layout of datasets for `dlscale doctor`."""

#: Environment variable of programs whose loaders are watched.
VARIABLE = "DLSCALE_LOADER"

HOOKS = {"dlscale.extensions.loading.inside": VARIABLE}

PROVIDES = {
    "LoaderWatch": "dlscale.extensions.loading.report.LoaderWatch",
    "loader_cause": "dlscale.extensions.loading.report.cause",
}

PROBES = {"layout": "dlscale.extensions.loading.layout.probe_layouts"}

SECTIONS = {"loading": "dlscale.extensions.loading.report.section"}
