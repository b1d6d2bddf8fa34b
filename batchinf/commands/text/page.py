"""A row of `inspect` as one HTML file: no scripts, no connections, everything in it."""

import os
import pathlib
from typing import Any

import jinja2

from batchinf.base.errors import UserError
from batchinf.base.storage import reason
from batchinf.base.text import plain
from batchinf.commands.inspect import InspectedSample, InspectReport, Token
from batchinf.commands.text.inspect import fields, probability, share, token_text

# Jinja2 escapes all values. The policy forbids scripts and any connection, should something slip through.
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Row {{ row }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; border-radius: 6px; padding: .7rem; }
mark { background: #3b82f655; color: inherit; border-radius: 3px; }
.error { color: #d33; }
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { opacity: .65; white-space: nowrap; }
.tokens { display: flex; flex-wrap: wrap; gap: .5rem .3rem; align-items: flex-start; }
.token { font: 12px/1.35 ui-monospace, monospace; border: 1px solid #8884; border-radius: 5px; max-width: 14rem;
  overflow: hidden; }
.token b { display: block; padding: .1rem .35rem; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
.token small { display: block; padding: 0 .35rem; opacity: .75; white-space: nowrap; }
.token small.self { font-weight: bold; opacity: 1; }
</style>
<h1>Row <bdi>{{ row }}</bdi> of <bdi>{{ folder }}</bdi></h1>
<h2>Prompt</h2>
{% if prompt is none %}<p>Not shown: {{ prompt_note }}</p>
{% else %}<pre dir="auto">
{%- for piece in prompt -%}
{%- if piece.is_special %}<mark>{{ piece.text }}</mark>{% else %}{{ piece.text }}{% endif -%}
{%- endfor -%}
</pre>
{% endif %}
{% for sample in samples %}
<h2>{% if samples | length > 1 %}Sample {{ loop.index0 }}{% else %}Output{% endif %}</h2>
{% if sample.error %}<p class="error">{{ sample.error }}</p>{% endif %}
{% if sample.text is not none %}<pre dir="auto">{{ sample.text }}</pre>{% endif %}
<table>
{% for name, value in sample.columns %}<tr><td><bdi>{{ name }}</bdi></td><td><bdi>{{ value }}</bdi></td></tr>
{% endfor %}</table>
{% for title, tokens in sample.groups %}{% if tokens %}
<h2>{{ title }}</h2>
<p>The stronger the colour, the less likely the token. Under each token: the most likely ones at its place.</p>
<div class="tokens">{% for token in tokens %}
<div class="token">
<b style="background: rgba(234, 88, 12, {{ token.weight }})" title="id {{ token.token_id }}">{{ token.text }}</b>
<small>{{ token.about }}</small>
{% for other in token.others %}
<small{% if other.is_self %} class="self"{% endif %}>{{ other.share }} {{ other.text }}</small>
{% endfor %}</div>{% endfor %}
</div>
{% endif %}{% endfor %}
{% endfor %}
</html>
"""


def row_page(report: InspectReport) -> str:
    """The row as one HTML file without scripts, with everything in it."""
    template = jinja2.Environment(autoescape=True, finalize=_visible).from_string(_PAGE)
    samples = [
        {
            "error": _error(sample),
            "text": sample.decoded,
            "columns": [(name, str(value)) for name, value in fields(sample)],
            "groups": [
                (title, [_token_block(token) for token in tokens if token.logprob is not None])
                for title, tokens in (("Prompt tokens", sample.prompt_tokens), ("Tokens", sample.tokens))
            ],
        }
        for sample in report.samples
    ]
    return template.render(
        row=report.row, folder=report.folder, prompt=report.prompt, prompt_note=report.prompt_note, samples=samples
    )


def _visible(value: Any) -> Any:
    """Control characters and marks of direction as escapes: the page shows them and does not obey them."""
    return plain(value) if type(value) is str else value


def _error(sample: InspectedSample) -> str:
    error = sample.fields.get("error_type")
    return "" if error is None else f"{error}: {sample.fields.get('error_message')}"


def _token_block(token: Token) -> dict[str, Any]:
    logprob = token.logprob or 0.0
    rank = "" if token.rank is None else f", rank {token.rank}"
    others = (
        {"text": token_text(other.text), "share": share(other.logprob), "is_self": other.token_id == token.token_id}
        for other in token.alternatives
    )
    return {
        "text": token_text(token.text),
        "token_id": token.token_id,
        "weight": f"{min(0.85, (1 - probability(logprob)) * 0.85):.2f}",
        "about": f"{logprob:.2f}{rank}",
        "others": list(others),
    }


def write_page(report: InspectReport, path: str) -> None:
    """Write the page. Raises UserError if the file cannot be written."""
    try:
        pathlib.Path(path).write_text(row_page(report), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--html: cannot write {os.fspath(path)}: {reason(error)}") from error
