"""A diagnosis as one page of HTML that needs nothing else.

Owns: the page.  Does not know: how a diagnosis was made.
Idea: whatever stands in a log may be hostile, so every text is escaped as it is put into the page,
and the page's own policy forbids scripts and whatever is elsewhere.
"""

from __future__ import annotations

from html import escape

from runtime.doctor.diagnosis import Diagnosis, Example, ReasonFound
from runtime.doctor.report_text import (
    losses,
    percent,
    place,
    prospect,
    savings,
    shown,
    summary,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #57606a; --line: #d0d7de;
  --gone: #ffd7d5; --new: #ccffd8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #3d444d; --gone: #67060c; --new: #033a16; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
section { border-top: 1px solid var(--line); padding: 1rem 0; }
meter { width: 100%; height: 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: .4rem; padding: .6rem; font: .9rem/1.5 ui-monospace, monospace; }
del { background: var(--gone); } ins { background: var(--new); text-decoration: none; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem;
  border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}: why prompts miss</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{summary}</p>
<p>{prospect}</p>
{rates}
{table}
{reasons}
</main>
</body>
</html>
"""


def html_report(diagnosis: Diagnosis, title: str) -> str:
    """Return a diagnosis as a page.

    title  what the log is called
    """
    return _PAGE.format(
        title=escape(shown(title)),
        style=_STYLE,
        summary=escape(summary(diagnosis)),
        prospect=escape(prospect(diagnosis)),
        rates=_rate("as it is", diagnosis.hit_rate) + _rate("mended", diagnosis.mended_hit_rate),
        table=_table(diagnosis.reasons) if diagnosis.reasons else "",
        reasons="\n".join(
            _section(number, one, diagnosis) for number, one in enumerate(diagnosis.reasons, 1)
        ),
    )


def _rate(name: str, share: float) -> str:
    text = f"Found in the cache, {name}: {percent(share)}"
    return (
        f'<p><label>{escape(text)}<meter min="0" max="1" value="{share:.4f}">'
        f"{percent(share)}</meter></label></p>\n"
    )


def _table(reasons: tuple[ReasonFound, ...]) -> str:
    rows = "\n".join(
        f'<tr><td><a href="#reason-{number}">{escape(one.title)}</a></td>'
        f'<td class="n">{one.num_requests:,}</td><td class="n">{one.lost_tokens:,}</td>'
        f'<td class="n">{one.saved_tokens:,}</td></tr>'
        for number, one in enumerate(reasons, 1)
    )
    return (
        '<table><thead><tr><th scope="col">reason</th><th scope="col" class="n">requests</th>'
        '<th scope="col" class="n">tokens lost</th><th scope="col" class="n">tokens saved'
        f"</th></tr></thead><tbody>\n{rows}\n</tbody></table>"
    )


def _section(number: int, one: ReasonFound, diagnosis: Diagnosis) -> str:
    example = "" if one.example is None else _example(one.example)
    return (
        f'<section id="reason-{number}">\n<h2>{number}. {escape(one.title)}</h2>\n'
        f"<p>{escape(losses(one))}</p>\n{example}<p>{escape(one.advice)}</p>\n"
        f"<p><strong>{escape(savings(one, diagnosis))}</strong></p>\n</section>"
    )


def _example(example: Example) -> str:
    before, theirs, ours, after = (
        escape(shown(text))
        for text in (example.before, example.theirs, example.ours, example.after)
    )
    return (
        f'<p class="soft">{escape(place(example))}</p>\n'
        f"<pre>…{before}<del>{theirs}</del><ins>{ours}</ins>{after}…</pre>\n"
    )
