"""The charts of the report, drawn by Vega-Lite within `vl_convert`: no browser, no network, no script in the result.

The colours are CSS variables of the page, so that a chart follows its dark mode. Each mark says its figures in its
`aria-label`, which is also its `<title>`: browsers show it when the pointer rests there.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from batchinf.base.text import duration, short_count
from batchinf.report.rows import Histogram, Share
from batchinf.report.timeline import PHASES, Period, Throughput, Timeline

_VEGA_LITE = "5.21"
_SVG = "http://www.w3.org/2000/svg"
_FONT = "system-ui, sans-serif"
_AXIS = {
    "labelColor": "var(--faint)",
    "titleColor": "var(--faint)",
    "gridColor": "var(--line)",
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "labelFont": _FONT,
    "titleFont": _FONT,
    "titleFontWeight": "normal",
    "labelFontSize": 11,
    "titleFontSize": 11,
    "labelOverlap": "greedy",
    "labelSeparation": 12,
}
_CONFIG = {
    "background": "transparent",
    "view": {"stroke": None},
    "axis": _AXIS,
    "bar": {"color": "var(--c1)"},
    "legend": {
        "labelColor": "var(--ink)",
        "labelFont": _FONT,
        "labelFontSize": 11,
        "title": None,
        "symbolType": "square",
    },
}
PHASE_COLORS = dict(zip(PHASES, ("--busy", "--idle", "--disk", "--starting", "--down", "--line"), strict=True))
# Without labelExpr the zero of an axis in thousands is `0k`. With `~s` a half is `500m`.
_RATE_AXIS = {"tickCount": 4, "labelExpr": "format(datum.value, datum.value < 1 ? '~g' : '~s')"}
# Widths of the plot for charts over time: on a screen, and on a phone.
WIDTHS = {"wide": 860, "narrow": 270}
_UNITS = ((2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


_MOST_LINES = 64


def throughput_chart(timeline: Timeline, width: int) -> str:
    """Output tokens, prompt tokens and rows a second over the time of work, with restarts and resumes as lines."""
    size, unit = _unit(timeline.work_s)
    scale = {"domain": [0, timeline.work_s / size], "nice": False}
    marks = [{"at": mark.at_s / size, "kind": mark.kind, "words": f"{mark.at}: {mark.text}"} for mark in timeline.marks]
    colors = _colors("kind", {"restart": "--bad", "resume": "--resume"}, None)
    line = {"type": "rule", "strokeWidth": 1.5, "strokeDash": [4, 3]}
    rules = _marks(marks, line, {"x": _number("at", scale=scale), "color": colors})
    panels: list[dict[str, Any]] = []
    for name, title, color in (
        ("output_tokens_per_s", "output tokens/s", "var(--c1)"),
        ("prompt_tokens_per_s", "prompt tokens/s", "var(--c2)"),
        ("rows_per_s", "output rows/s", "var(--c3)"),
    ):
        rates = [(period, getattr(period, name)) for period in timeline.throughput]
        if any(rate for _, rate in rates):
            values = [
                _over_time(period, size, f"{short_count(rate)} {title}") | {"rate": rate} for period, rate in rates
            ]
            encoding = {
                "x": _number("start", scale=scale, axis={"labels": False, "ticks": False, "title": None}),
                "x2": {"field": "stop"},
                "y": _number("rate", axis={**_RATE_AXIS, "title": title}),
                "y2": {"datum": 0},
            }
            bars = _marks(values, {"type": "bar", "color": color, "strokeWidth": 0}, encoding)
            panels.append({"width": width, "height": 90, "layer": [bars, rules] if marks else [bars]})
    if not panels:
        return ""
    panels[-1]["layer"][0]["encoding"]["x"]["axis"] = _time_axis(unit, width)
    return _svg({"vconcat": panels, "spacing": 8}, "Throughput over time")


def replicas_chart(timeline: Timeline, width: int) -> str:
    """What each replica did, as a bar over the time of work."""
    size, unit = _unit(timeline.work_s)
    names = timeline.replicas[:_MOST_LINES]
    periods = [period for period in timeline.periods if period.replica in names]
    if not periods:
        return ""
    present = {period.phase for period in periods}
    colors: dict[str, str] = {phase: color for phase, color in PHASE_COLORS.items() if phase in present}
    values = [
        _over_time(period, size, period.phase, f"replica {period.replica}, ")
        | {"replica": period.replica, "phase": period.phase}
        for period in periods
    ]
    scale = {"domain": [0, timeline.work_s / size], "nice": False}
    axis = {"title": "replica", "grid": False, "labelOverlap": False, "titlePadding": 10}
    encoding = {
        "y": {"field": "replica", "type": "nominal", "sort": list(names), "axis": axis},
        "x": _number("start", scale=scale, axis=_time_axis(unit, width)),
        "x2": {"field": "stop"},
        "color": _colors("phase", colors, {"orient": "top", "columns": 3 if width < 400 else 5}),
    }
    chart = _marks(values, {"type": "bar", "strokeWidth": 0}, encoding)
    height = {"step": 20 if len(names) < 20 else 12}
    return _svg({"width": width, "height": height, **chart}, "What each replica did over time")


def histogram_chart(histogram: Histogram) -> str:
    """Rows or tokens by the size of a value."""
    bins = histogram.bins
    num_ticks = 6
    if histogram.unit == "tokens" and bins:  # no tick between whole numbers
        num_ticks = max(1, min(num_ticks, round(bins[-1].stop - bins[0].start)))
    values = [{**asdict(bar), "words": f"{bar.start:.6g} to {bar.stop:.6g}: {bar.num:,}"} for bar in bins]
    axis = {"title": histogram.unit or None, "tickCount": num_ticks, "grid": False}
    encoding = {
        "x": _number("start", bin={"binned": True}, axis=axis),
        "x2": {"field": "stop"},
        "y": _number("num", axis=_count_axis([bar.num for bar in bins], None)),
    }
    return _svg({"width": 280, "height": 130, **_marks(values, "bar", encoding)}, histogram.title)


def shares_chart(shares: Sequence[Share], title: str) -> str:
    """Rows by the value of a column, the most frequent first."""
    values = [
        {"name": share.name or "(empty)", "num": share.num_rows, "words": f"{share.name}: {share.num_rows:,} rows"}
        for share in shares
    ]
    axis = {"title": None, "labelLimit": 130, "labelOverlap": False}
    encoding = {
        "y": {"field": "name", "type": "nominal", "sort": [value["name"] for value in values], "axis": axis},
        "x": _number("num", axis=_count_axis([share.num_rows for share in shares], "rows")),
    }
    return _svg({"width": 200, "height": {"step": 20}, **_marks(values, "bar", encoding)}, title)


def _marks(values: Sequence[dict[str, Any]], mark: str | dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    """A mark for each value, which says its `words`."""
    return {"data": {"values": values}, "mark": mark, "encoding": {**encoding, "description": {"field": "words"}}}


def _number(field: str, **options: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", **options}


def _over_time(period: Throughput | Period, size: float, text: str, prefix: str = "") -> dict[str, Any]:
    """A bar from the start to the stop. size: seconds of a unit of the axis."""
    words = f"{prefix}{duration(period.start_s)} to {duration(period.stop_s)}: {text}"
    return {"start": period.start_s / size, "stop": period.stop_s / size, "words": words}


def _count_axis(counts: Sequence[int], title: str | None) -> dict[str, Any]:
    """An axis of whole numbers: no tick is between two of them."""
    return {**_RATE_AXIS, "title": title, "tickCount": max(1, min(4, max(counts, default=1)))}


def _colors(field: str, colors: dict[str, str], legend: dict[str, Any] | None) -> dict[str, Any]:
    scale = {"domain": list(colors), "range": [f"var({name})" for name in colors.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _time_axis(unit: str, width: int) -> dict[str, Any]:
    # With `format`, vega would write ten seconds as 1e+1.
    return {
        "title": f"{unit} since the start, without pauses",
        "tickCount": 5 if width < 400 else 10,
        "labelExpr": "format(datum.value, '~g')",
    }


def _unit(work_s: float) -> tuple[float, str]:
    return next((size, unit) for least, size, unit in _UNITS if work_s >= least)


def _svg(spec: dict[str, Any], title: str) -> str:
    """The chart as an element of HTML. title: what a screen reader says of it."""
    ElementTree.register_namespace("", _SVG)
    import vl_convert  # a large library, which few commands need

    schema = f"https://vega.github.io/schema/vega-lite/v{_VEGA_LITE.partition('.')[0]}.json"
    svg = vl_convert.vegalite_to_svg({"$schema": schema, "config": _CONFIG, **spec}, vl_version=_VEGA_LITE)
    root = ElementTree.fromstring(svg)
    root.set("role", "img")
    root.set("aria-label", title)
    for element in list(root.iter()):
        words = element.get("aria-label")
        if words and element.get("role") == "graphics-symbol" and element is not root:
            ElementTree.SubElement(element, f"{{{_SVG}}}title").text = words
    return ElementTree.tostring(root, encoding="unicode")
