"""Charts as SVG, drawn by Vega-Lite within `vl_convert`: no browser, no network, and no script in the result."""

from typing import Any

_VEGA_LITE = "5.21"
# Behind the first tag of each chart.
CHART_MARK = b"<!-- drawn by batchinf -->"


def svg_of(spec: dict[str, Any]) -> str:
    """The chart of a Vega-Lite specification without its `$schema`."""
    import vl_convert  # a large library, which few commands need

    schema = f"https://vega.github.io/schema/vega-lite/v{_VEGA_LITE.partition('.')[0]}.json"
    svg = str(vl_convert.vegalite_to_svg({"$schema": schema, **spec}, vl_version=_VEGA_LITE))
    return svg.replace(">", f">{CHART_MARK.decode()}", 1)
