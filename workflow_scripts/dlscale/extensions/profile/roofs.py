"""Roofline chart of the operators of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlscale.report.charts import FIT, Chart, View, rounded, scale_of, styles, tooltip


def roofs(name: str, about: str, rows: Sequence[View], runs: Sequence[str], shown: Mapping[str, str]) -> Chart:
    """Return a roofline chart: points below roofs, in the colours of the runs, on logarithmic axes.

    A row is a point, or a corner of a "roof", with "intensity" (FLOP/byte) and "rate" (GFLOP/s). A point also has its
    "share" (% of the time of all operators or modules), and may have a text, "said".

    Parameters
    ----------
    shown
        Fields of the tooltip, with their titles.
    """
    kept, looks = rounded(rows), styles(runs)
    pair = {"field": "run", "type": "nominal"}
    axes = {"x": ("intensity", "arithmetic intensity (FLOP/byte)"), "y": ("rate", "rate (GFLOP/s)")}
    encoding: View = {
        axis: {"field": name, "title": title, "type": "quantitative"} for axis, (name, title) in axes.items()
    }
    for axis, room in (("x", 50), ("y", 25)):  # space for texts at the ends
        encoding[axis]["scale"] = {"type": "log", "nice": False, "padding": room}
    encoding |= {
        "color": {**pair, "scale": scale_of({run: colour for run, (colour, _) in looks.items()})},
        "opacity": {"condition": {"param": "chosen", "value": 0.8}, "value": 0.08},
        "tooltip": tooltip(kept, {"run": "run", **shown}),
    }
    params = [
        {"name": "chosen", "select": {"type": "point", "fields": ["run"]}, "bind": "legend"},
        {"name": "view", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
    ]
    shape = {**pair, "scale": scale_of({run: shape for run, (_, shape) in looks.items()})}
    size = {"field": "share", "type": "quantitative", "scale": {"range": [12, 400]}, "legend": None}
    layer: list[View] = [
        {
            "mark": {"type": "line", "clip": True},
            "transform": [{"filter": "datum.roof"}],
            "params": params,
            "encoding": {"tooltip": {"value": None}},
        },
        {
            "mark": {"type": "point", "filled": True, "clip": True},
            "transform": [{"filter": "!datum.roof"}],
            "encoding": {"shape": shape, "size": size},
        },
        {
            "mark": {"type": "text", "dy": -14, "limit": 160, "clip": True},
            "transform": [{"filter": "datum.said"}],
            "encoding": {"text": {"field": "said"}},
        },
    ]
    main = {"data": {"values": kept}, "encoding": encoding, "layer": layer}
    spec = {"description": about, "width": "container", "height": 300, "autosize": FIT, "layer": [main]}
    return Chart(name, about, spec, runs=list(runs))
