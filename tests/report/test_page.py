"""The report of whole jobs, live, dead and done; and in a browser, where hostile contents must show harmlessly."""

import contextlib
import html.parser
import json
import pathlib
import re
import shutil
import signal
import subprocess
from collections import Counter
from typing import Any

import pytest

import jobs
from batchinf import api
from batchinf.base.storage import Folder
from batchinf.manifest.lines import Bottleneck, Done, Speed
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import last_epoch, read_state
from batchinf.report import charts
from batchinf.report.page import report_page
from batchinf.report.rows import Bin, Histogram, Share
from batchinf.report.timeline import Period, Timeline

HOSTILE = (
    "<script>document.title='ran'</script>",
    '"><img src=x onerror="document.title=\'ran\'">',
    "<svg onload=\"document.title='ran'\">",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe\u2066",
    "{{ 7 * 7 }} {% raw %}",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(html.parser.HTMLParser):
    """The elements of a page, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._within: list[str] = []
        self.feed(text)
        self.text = "".join(self.words)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attributes
        self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._within:
            del self._within[len(self._within) - 1 - self._within[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if "style" not in self._within:
            self.words.append(data)


def hostile_rows(folder: pathlib.Path) -> pathlib.Path:
    """A spec for rows with hostile ids and prompts, half of them too long; the longest has 1 MB."""
    rows = []
    for i in range(60):
        words = HOSTILE[i % len(HOSTILE)]
        size = 10**6 if i == 0 else 9000 if i % 2 else 10
        rows.append({"id": f"{words} {i}", "prompt": (f"{words} " * (size // len(words) + 1))})
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    out = folder / "out <img src=x onerror=document.title='ran'>"
    return jobs.spec_of(
        folder,
        input={"path": str(data)},
        output={"path": str(out), "keep_columns": [], "include_prompt": True},
        sampling={"logprobs": 3},
        scripted={"max_model_len": 512, "step_s": 0.04},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The report of a finished job."""
    folder = tmp_path_factory.mktemp("hostile")
    path = hostile_rows(folder)
    jobs.finish(path)
    [out] = folder.glob("out *")
    made = jobs.run("report", out, "-o", folder / "page.html")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(folder / "page.html")
    return folder / "page.html"


def assert_harmless(page: Page) -> None:
    assert not {"script", "img", "iframe", "link", "object", "embed"} & page.tags.keys()
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    # Nothing is loaded from anywhere.
    assert all(
        value is not None and value.startswith("#") for name, value in page.attributes if name in ("href", "src")
    )
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page.text)


def test_hostile_contents_are_text(hostile: pathlib.Path) -> None:
    text = hostile.read_text(encoding="utf-8")
    page = Page(text)
    assert_harmless(page)
    assert len(text) < 3_000_000
    assert "default-src 'none'" in text
    # They are shown all the same.
    assert "id <script>document.title='ran'</script> 0" in page.text
    assert "<img src=x onerror=document.title='ran'>" in page.text
    assert "prompt_too_long" in page.text
    assert page.text.count(HOSTILE[0]) < 50


def test_the_report_goes_to_stdout_and_is_no_markdown(hostile: pathlib.Path, tmp_path: pathlib.Path) -> None:
    [out] = hostile.parent.glob("out *")
    made = jobs.run("report", out, "-o", "-")
    assert made.returncode == 0, made.stderr
    assert_harmless(Page(made.stdout))
    assert made.stdout.startswith("<!doctype html>")
    assert not pathlib.Path("-").exists()
    for option, value in (("-o", tmp_path / "report.md"), ("--to", "md"), ("--md", "")):
        refused = jobs.run("report", out, option, *([value] if value else []))
        assert refused.returncode == 2
        assert "the report is HTML" in refused.stderr


def test_what_the_page_says(hostile: pathlib.Path) -> None:
    page = Page(hostile.read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", page.text)
    assert "output rows60of 60 (100.0%)" in text.replace(" 60 of", "60of").replace("rows 60", "rows60")
    for heading in ("Throughput", "Replicas", "Lengths", "Logprobs and numbers", "Outputs", "Errors", "Environment"):
        assert heading in text
    assert "max_num_seqs: 8" in text
    # No replica waited for the disk.
    assert "</span>busy</th>" in hostile.read_text() and "</span>disk</th>" not in hostile.read_text()
    # Throughput and replicas in two widths, two lengths, three of numbers, finish reasons, texts that repeat.
    assert page.tags["svg"] == 2 * 2 + 2 + 3 + 2
    assert page.tags["title"] > 50


def test_the_speed_of_the_last_run_and_what_limited_it(hostile: pathlib.Path, tmp_path: pathlib.Path) -> None:
    [out] = hostile.parent.glob("out *")
    job = tmp_path / "out"
    shutil.copytree(out, job)
    folder = Folder(job)
    rates = {"work_s": 100.0, "prompt_tokens_per_s": 5000.0, "output_tokens_per_s": 2000.0, "cache_tokens": 400_000}
    measured = {**rates, "run_s": 150.0, "output_tokens_per_s": 1500.0, "cache_tokens": 400_100, "num_gpus": 1}
    found = {"kind": "sequences", "share": 0.9, "reason": "all 256 ran", "change": "engine.max_num_seqs 512 <b>"}
    speed = Speed(**measured, bottleneck=Bottleneck(**found))
    with contextlib.closing(Manifest(folder, last_epoch(folder) + 1, state=read_state(folder))) as manifest:
        manifest.record(Done(speed))
        manifest.commit()
    made = jobs.run("report", job, "-o", tmp_path / "page.html")
    assert made.returncode == 0, made.stderr
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", page.text)
    assert_harmless(page)
    assert "output tokens/s1,500" in text
    assert "tokens of cache400,100" in text
    # The rate of the closing lines has its own tile.
    assert re.search(r"output tokens/s ?1\.5k ?while the engines worked \(1m40s\)", text), text[:800]
    assert "all 256 ran; to try: engine.max_num_seqs 512 <b>" in text
    assert "predicted" not in text


def test_the_rate_of_a_resumed_job_is_over_all_runs(hostile: pathlib.Path, tmp_path: pathlib.Path) -> None:
    [out] = hostile.parent.glob("out *")
    job = tmp_path / "out"
    shutil.copytree(out, job)
    speed = Speed(run_s=150.0, work_s=100.0, prompt_tokens_per_s=9.0, output_tokens_per_s=7.0)
    with contextlib.closing(Manifest(Folder(job), last_epoch(Folder(job)) + 1, state=read_state(Folder(job)))) as log:
        log.record(Done(speed))
        log.commit()
    known = {"stalled_by_disk_s": 0.0, "num_running": 0, "num_prompt_tokens": 0, "num_answered": 0, "state": "running"}
    for epoch, num_tokens in ((1, 9000), (2, 1000)):
        lines = [
            {"at": 1e9 + 1e4 * epoch + at, "replicas": [
                {**known, "replica": 0, "incarnation": f"{epoch:06d}.0001", "steps": at, "num_output_tokens": tokens}
            ]}
            for at, tokens in ((0, 0), (10, num_tokens))
        ]  # fmt: skip
        (job / "telemetry" / f"{epoch:06d}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert jobs.run("report", job).returncode == 0
    text = re.sub(r"\s+", " ", Page((job / "report.html").read_text(encoding="utf-8")).text)
    assert re.search(r"output tokens/s ?500 ?while the engines worked \(20s in 2 runs\)", text), text[:800]


def a_timeline(periods: tuple[Period, ...]) -> Timeline:
    return Timeline(
        work_s=5.0, engines_s=5.0, num_runs=1, ended_at="", throughput=(), periods=periods, marks=(), phases={}
    )


def test_each_replica_has_its_name_at_its_bar() -> None:
    names = [f"{index}/9: 0" for index in range(9)] * 3
    periods = tuple(Period(f"{n}{name}", "busy", 0.0, 5.0) for n, name in enumerate(names))
    drawn = charts.replicas_chart(a_timeline(periods), 270)
    shown = [text for text in re.findall("<text.*?</text>", drawn) if 'opacity="0"' not in text]
    assert all(any(f">{period.replica}<" in text for text in shown) for period in periods)


def test_labels_are_text_in_a_chart() -> None:
    drawn = Page(charts.shares_chart([Share("<script>x</script>&amp;", 3), Share("", 1)], "<b>"))
    assert_harmless(drawn)
    assert "<script>x</script>&amp;: 3 rows" in drawn.text
    assert "(empty)" in drawn.text


@pytest.mark.slow
@pytest.mark.fewer_rows
def test_a_job_that_was_killed_has_a_report(tmp_path: pathlib.Path) -> None:
    sections: Any = {
        "scripted": {"step_s": 0.02},
        "output": {"rows_per_shard": 20},
        "parallel": {"data_parallel_size": 1},
    }
    killed = jobs.start("run", jobs.spec_of(tmp_path, **sections))
    jobs.wait_until(lambda: any((tmp_path / "out" / "parts").glob("*.parquet")))
    live = jobs.run("report", tmp_path / "out", "-o", tmp_path / "live.html")
    killed.send_signal(signal.SIGKILL)
    jobs.end(killed)
    dead = jobs.run("report", tmp_path / "out")
    assert (live.returncode, dead.returncode) == (0, 0), live.stderr + dead.stderr
    running, stopped = (
        Page(path.read_text(encoding="utf-8")).text
        for path in (tmp_path / "live.html", tmp_path / "out" / "report.html")
    )
    assert "It runs as process" in running
    assert "stopped" in stopped
    num_rows = int(re.search(r"output rows\s*([\d,]+)", stopped)[1].replace(",", ""))  # type: ignore[index]
    assert 0 < num_rows < jobs.num_fewer


def test_nowhere_to_write_is_one_line(hostile: pathlib.Path, tmp_path: pathlib.Path) -> None:
    [out] = hostile.parent.glob("out *")
    refused = jobs.run("report", out, "-o", tmp_path / "absent" / "page.html")
    assert refused.returncode == 2
    assert "name another file with -o" in refused.stderr
    assert jobs.run("report", tmp_path).returncode == 2


def browsed(path: pathlib.Path, profile: pathlib.Path, *options: str) -> tuple[str, str]:
    """A page in headless Chromium: its elements after loading, and the lines of its console."""
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --log-level=0 --virtual-time-budget=3000"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_each_label_has_its_name_and_counts_have_whole_ticks() -> None:
    names = ("negative", "neutral", "positive", "mixed")
    drawn = charts.shares_chart([Share(name, 4 - number) for number, name in enumerate(names)], "labels")
    shown = [text for text in re.findall("<text.*?</text>", drawn) if 'opacity="0"' not in text]
    assert [name for name in names if any(f">{name}<" in text for text in shown)] == list(names)
    bins = (Bin(6, 7, 2), Bin(7, 8, 1), Bin(8, 9, 0), Bin(9, 10, 1))
    ticks = re.findall("<text[^>]*>([^<]*)</text>", charts.histogram_chart(Histogram("lengths", "tokens", bins)))
    assert set(ticks) <= {*map(str, range(11)), "tokens"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: make browser installs it where apt-get is")
def test_nothing_runs_in_a_browser(hostile: pathlib.Path, tmp_path: pathlib.Path) -> None:
    dom, console = browsed(hostile, tmp_path / "profile")
    page = Page(dom)
    assert console == ""
    assert "<title>ran" not in dom
    assert page.text.lstrip().startswith("out <img src=x onerror=document.title='ran'>: batchinf report")
    assert_harmless(page)
    assert page.tags["svg"] == 11
    # A page that does run something is noticed.
    bad = tmp_path / "bad.html"
    bad.write_text(f"<title>a page</title>{HOSTILE[0]}<script>absent()</script>")
    dom, console = browsed(bad, tmp_path / "other")
    assert "<title>ran</title>" in dom
    assert "absent is not defined" in console
    # And the policy of the page alone would stop a script that was not escaped.
    injected = tmp_path / "injected.html"
    injected.write_text(
        hostile.read_text(encoding="utf-8").replace("</main>", f"{HOSTILE[0]}</main>"), encoding="utf-8"
    )
    dom, console = browsed(injected, tmp_path / "third")
    assert "<title>ran" not in dom
    assert "Content Security Policy" in console


def test_bars_of_few_whole_numbers_stand_on_their_ticks() -> None:
    """The middle of each bar is at the tick of its number."""
    bins = (Bin(6, 7, 2), Bin(7, 8, 1))
    drawn = charts.histogram_chart(Histogram("lengths", "tokens", bins, has_single_values=True))
    bars = re.findall(r'aria-label="(\d): \d"[^>]* d="M([\d.]+),[\d.]+h([\d.]+)', drawn)
    middles = {number: float(left) + float(width) / 2 for number, left, width in bars}
    ticks = dict(re.findall(r'translate\(([\d.]+),16\)"[^>]*>(\d)<', drawn))
    assert middles == pytest.approx({number: float(at) for at, number in ticks.items()}, abs=1)
    assert [*middles] == ["6", "7"]


@pytest.mark.slow
@pytest.mark.fewer_rows
@pytest.mark.usefixtures("quick_replicas")
def test_prompts_and_kept_columns_are_shown_from_any_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job began with a relative path. Without its input, one line says so, and the kept columns are there."""
    (tmp_path / "rows.csv").write_text("key,group,text\n1,c,Tell me a story.\n2,a,Count to three.\n")
    spec = jobs.spec_of(
        tmp_path,
        input={"path": "rows.csv", "id_column": "key", "messages": [{"role": "user", "content": "{{ text }}"}]},
        output={"path": "out/job", "keep_columns": ["group"]},
        scripted={"step_s": 0.0},
    )
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        api.run(spec, quiet=True)
    shown = Page(report_page(str(tmp_path / "out" / "job"))).text
    for words in ("Tell me a story.", "Count to three.", "group: c", "group: a"):
        assert words in shown
    (tmp_path / "rows.csv").unlink()
    shown = Page(report_page(str(tmp_path / "out" / "job"))).text
    assert "Tell me a story." not in shown
    assert shown.count("The prompts and images of these rows are not shown: ") == 1
    assert "group: c" in shown
