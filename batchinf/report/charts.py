"""The charts of the report.

The colours are CSS variables of the page, so that a chart follows its dark mode. Each mark says its figures in its
`aria-label`, which is also its `<title>`: browsers show it when the pointer rests there.
"""

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from batchinf.base.chart import svg_of
from batchinf.base.text import duration, short_count
from batchinf.report.rows import Histogram, Share
from batchinf.report.timeline import PHASES, Timeline

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


def throughput_chart(timeline: Timeline, width: int) -> str:
    """Output tokens, prompt tokens and rows a second over the time of work, with restarts and resumes as lines."""
    size, unit = _unit(timeline.work_s)
    panels = []
    for field, title, color in (
        ("output_tokens_per_s", "output tokens/s", "var(--c1)"),
        ("prompt_tokens_per_s", "prompt tokens/s", "var(--c2)"),
        ("rows_per_s", "output rows/s", "var(--c3)"),
    ):
        values = [
            {
                "start": one.start_s / size,
                "stop": one.stop_s / size,
                "rate": rate,
                "words": f"{duration(one.start_s)} to {duration(one.stop_s)}: {short_count(rate)} {title}",
            }
            for one in timeline.throughput
            for rate in [getattr(one, field)]
        ]
        if any(value["rate"] for value in values):
            panels.append(_panel(values, _marks(timeline, size), width, title, color, timeline.work_s / size))
    for panel in panels[:-1]:
        panel["layer"][0]["encoding"]["x"]["axis"] = {"labels": False, "ticks": False, "title": None}
    if panels:
        panels[-1]["layer"][0]["encoding"]["x"]["axis"] = _time_axis(unit, width)
    return _svg({"vconcat": panels, "spacing": 8}, "Throughput over time") if panels else ""


def _panel(
    values: list[dict[str, Any]], marks: list[dict[str, Any]], width: int, title: str, color: str, end: float
) -> dict[str, Any]:
    scale = {"domain": [0, end], "nice": False}
    bars = {
        "data": {"values": values},
        "mark": {"type": "bar", "color": color, "strokeWidth": 0},
        "encoding": {
            "x": {"field": "start", "type": "quantitative", "scale": scale},
            "x2": {"field": "stop"},
            "y": {"field": "rate", "type": "quantitative", "axis": {**_RATE_AXIS, "title": title}},
            "y2": {"datum": 0},
            "description": {"field": "words"},
        },
    }
    rules = {
        "data": {"values": marks},
        "mark": {"type": "rule", "strokeWidth": 1.5, "strokeDash": [4, 3]},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "scale": scale},
            "color": _colors("kind", {"restart": "--bad", "resume": "--resume"}, None),
            "description": {"field": "words"},
        },
    }
    return {"width": width, "height": 90, "layer": [bars, *([rules] if marks else [])]}


def _marks(timeline: Timeline, size: float) -> list[dict[str, Any]]:
    return [{"at": mark.at_s / size, "kind": mark.kind, "words": f"{mark.at}: {mark.text}"} for mark in timeline.marks]


_MOST_LINES = 64


def replicas_chart(timeline: Timeline, width: int) -> str:
    """What each replica did, as a bar over the time of work."""
    size, unit = _unit(timeline.work_s)
    names = timeline.replicas[:_MOST_LINES]
    values = [
        {
            "replica": period.replica,
            "start": period.start_s / size,
            "stop": period.stop_s / size,
            "phase": period.phase,
            "words": f"replica {period.replica}, {duration(period.start_s)} to {duration(period.stop_s)}: "
            f"{period.phase}",
        }
        for period in timeline.periods
        if period.replica in names
    ]
    present: dict[str, str] = {
        phase: PHASE_COLORS[phase] for phase in PHASES if any(value["phase"] == phase for value in values)
    }
    chart = {
        "width": width,
        "height": {"step": 20 if len(names) < 20 else 12},
        "data": {"values": values},
        "mark": {"type": "bar", "strokeWidth": 0},
        "encoding": {
            "y": {
                "field": "replica",
                "type": "nominal",
                "sort": list(names),
                "axis": {"title": "replica", "grid": False, "labelOverlap": False, "titlePadding": 10},
            },
            "x": {
                "field": "start",
                "type": "quantitative",
                "scale": {"domain": [0, timeline.work_s / size], "nice": False},
                "axis": _time_axis(unit, width),
            },
            "x2": {"field": "stop"},
            "color": _colors("phase", present, {"orient": "top", "columns": 3 if width < 400 else 5}),
            "description": {"field": "words"},
        },
    }
    return _svg(chart, "What each replica did over time") if values else ""


def histogram_chart(histogram: Histogram) -> str:
    """Rows or tokens by the size of a value."""
    values = [
        {
            "start": one.start,
            "stop": one.stop,
            "num": one.num,
            "words": f"{one.start:.6g} to {one.stop:.6g}: {one.num:,}",
        }
        for one in histogram.bins
    ]
    num_ticks = 6
    if histogram.unit == "tokens" and values:  # no tick between whole numbers
        num_ticks = max(1, min(num_ticks, round(histogram.bins[-1].stop - histogram.bins[0].start)))
    encoding = {
        "x": {
            "field": "start",
            "type": "quantitative",
            "bin": {"binned": True},
            "axis": {"title": histogram.unit or None, "tickCount": num_ticks, "grid": False},
        },
        "x2": {"field": "stop"},
        "y": {"field": "num", "type": "quantitative", "axis": _count_axis([one.num for one in histogram.bins], None)},
        "description": {"field": "words"},
    }
    return _svg(
        {"width": 280, "height": 130, "data": {"values": values}, "mark": "bar", "encoding": encoding}, histogram.title
    )


def shares_chart(shares: Sequence[Share], title: str) -> str:
    """Rows by the value of a column, the most frequent first."""
    values = [
        {"name": one.name or "(empty)", "num": one.num_rows, "words": f"{one.name}: {one.num_rows:,} rows"}
        for one in shares
    ]
    encoding = {
        "y": {
            "field": "name",
            "type": "nominal",
            "sort": [value["name"] for value in values],
            "axis": {"title": None, "labelLimit": 130, "labelOverlap": False},
        },
        "x": {"field": "num", "type": "quantitative", "axis": _count_axis([one.num_rows for one in shares], "rows")},
        "description": {"field": "words"},
    }
    return _svg(
        {"width": 200, "height": {"step": 20}, "data": {"values": values}, "mark": "bar", "encoding": encoding}, title
    )


def _count_axis(counts: Sequence[int], title: str | None) -> dict[str, Any]:
    """An axis of whole numbers: no tick is between two of them."""
    return {**_RATE_AXIS, "title": title, "tickCount": max(1, min(4, max(counts, default=1)))}


def _colors(field: str, colors: dict[str, str], legend: dict[str, Any] | None) -> dict[str, Any]:
    scale = {"domain": list(colors), "range": [f"var({name})" for name in colors.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _time_axis(unit: str, width: int) -> dict[str, Any]:
    # With `format`, vega would write ten seconds as 1e+1.
    ticks = {"tickCount": 5 if width < 400 else 10, "labelExpr": "format(datum.value, '~g')"}
    return {"title": f"{unit} of work", **ticks}


def _unit(work_s: float) -> tuple[float, str]:
    return next((size, unit) for least, size, unit in _UNITS if work_s >= least)


def _svg(spec: dict[str, Any], title: str) -> str:
    """The chart as an element of HTML. title: what a screen reader says of it."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg_of({"config": _CONFIG, **spec}))
    root.set("role", "img")
    root.set("aria-label", title)
    for element in list(root.iter()):
        words = element.get("aria-label")
        if words and element.get("role") == "graphics-symbol" and element is not root:
            ElementTree.SubElement(element, f"{{{_SVG}}}title").text = words
    return ElementTree.tostring(root, encoding="unicode")
