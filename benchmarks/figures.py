"""The figures of `run.py`: results.json, and the table of medians and ranges."""

import json
import pathlib
import statistics
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from workloads import KINDS, Workload

Found = dict[str, Any]
Wanted = tuple[Workload, str, pathlib.Path]


class Results:
    """Figures of each workload, by kind and round. results.json is always up to date."""

    def __init__(self, out: pathlib.Path, fresh: Iterable[tuple[Workload, str, int]]) -> None:
        """fresh: workload, kind and round of the runs to come, in the table's order; earlier figures are dropped."""
        self._path, self._lock = out / "results.json", threading.Lock()
        known = json.loads(self._path.read_text()) if self._path.exists() else []
        self._found: dict[str, Found] = {found["workload"]["name"]: found for found in known if "runs" in found}
        for workload, kind, number in fresh:
            found = self._found.setdefault(workload.name, {"workload": asdict(workload), "runs": {}})
            found["runs"][kind] = [run for run in found["runs"].get(kind, []) if run["round"] != number]

    def has(self, workload: Workload, kind: str, number: int) -> bool:
        """Whether a run of this round has ended well."""
        runs = self._found.get(workload.name, {"runs": {}})["runs"].get(kind, [])
        return number in _rates(runs, "seconds")

    def add(self, workload: Workload, kind: str, figures: Found) -> None:
        """Add the figures of a round, or replace those that are there."""
        with self._lock:
            found = self._found[workload.name]
            found["workload"] = asdict(workload)
            runs = [run for run in found["runs"][kind] if run["round"] != figures["round"]]
            found["runs"][kind] = sorted([*runs, figures], key=lambda run: run["round"])
            self._path.write_text(json.dumps(list(self._found.values()), indent=1))
            print(workload.name, kind, figures, flush=True)

    def collect(self, wanted: Sequence[Wanted], more: Found, wall_s: float | None = None) -> None:
        """Add the figures that rivals have written.

        more: further figures of each. wall_s: of the process, once it has ended. Then those without a result are added
        too, and each gets the time that the process would have taken for it alone.
        """
        found: list[tuple[Workload, str, Found]] = []
        for workload, kind, path in wanted:
            try:
                found.append((workload, kind, json.loads(path.read_text())))
            except (OSError, json.JSONDecodeError):
                if wall_s is not None:
                    found.append((workload, kind, {}))
        spent = sum(figures.get("run_s", 0) for _, _, figures in found if not figures.get("is_shared"))
        for workload, kind, figures in found:
            if wall_s is not None:
                figures["wall_s"] = round(wall_s - spent + figures.get("run_s", 0), 1)
            figures = {**more, **figures}
            if figures not in self._found[workload.name]["runs"][kind]:
                self.add(workload, kind, figures)

    def table(self) -> str:
        """Medians, with ranges from two rounds on.

        `first / it`: the speed of the workload's first line, divided by that of this one; the range is over rounds.
        """
        lines = [
            "| workload | how | rounds | tokens/s | range | window, s | process, s | tokens | first / it | range |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for found in self._found.values():
            unit = "prompt" if found["workload"]["counts_prompts"] else "output"
            rates = {kind: _rates(runs, f"{unit}_tokens_per_s") for kind, runs in found["runs"].items() if runs}
            jobs = [kind for kind in rates if kind not in KINDS]
            base = rates[jobs[0]] if jobs else {}
            for kind in [*jobs, *(kind for kind in KINDS if kind in rates)]:
                lines.append(_row(found["workload"]["name"], kind, found["runs"][kind], unit, rates[kind], base))
        return "\n".join(lines)


def _rates(runs: Sequence[Found], name: str) -> dict[int, float]:
    """By round, where the run succeeded."""
    return {run["round"]: run[name] for run in runs if run.get(name)}


def _row(
    workload: str, kind: str, runs: Sequence[Found], unit: str, rates: dict[int, float], base: dict[int, float]
) -> str:
    values = sorted(rates.values())
    if not values:
        return f"| {workload} | {kind} | 0 | failed | | | | | | |"
    good = [run for run in runs if run["round"] in rates]
    tokens = sorted({run[f"num_{unit}_tokens"] for run in good})
    window, process = (
        _median([run[name] for run in good if run.get(name) is not None]) for name in ("seconds", "wall_s")
    )
    ratio = ratios = ""
    if base and base is not rates:
        ratio = f"{statistics.median(base.values()) / statistics.median(values):.3f}"
        pairs = sorted(base[number] / rates[number] for number in base.keys() & rates.keys())
        ratios = f"{pairs[0]:.3f} to {pairs[-1]:.3f}" if len(pairs) > 1 else ""
    spread = f"{values[0]:,.0f} to {values[-1]:,.0f}" if len(values) > 1 else ""
    counts = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    rate = f"{statistics.median(values):,.0f}"
    cells = [workload, kind, str(len(values)), rate, spread, window, process, counts, ratio, ratios]
    return f"| {' | '.join(cells)} |"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else ""
