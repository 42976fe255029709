"""An HTML file that holds all it shows and asks nothing of the network.

It may hold hostile text (prompts, answers, names). Three walls: whoever makes the body escapes what is shown, figures
are JSON in which no tag can end, and a content security policy lets only the two scripts of this file run (by their
hash).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import Any

from headway.reports.page_style import CSS


def document(title: str, body: str, figures: Any, script: str, *, css: str = "", source: str) -> str:
    """The whole file: `body` (HTML), and `script`, which finds Plotly loaded and `figures` as JSON in #figures.

    css: beside the style of every page; source: what the page was made from, for its last line.
    """
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    allowed = " ".join(f"'sha256-{_sha256(text)}'" for text in (library, script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)} · Headway</title>
<style>{CSS}{css}</style>
</head>
<body>
<main>
{body}
<footer>Made by Headway from {source}. Everything shown is inside this file.</footer>
</main>
<script type="application/json" id="figures">{json_in_html(figures)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def figure(name: str, drawn: Any, title: str, caption: str) -> str:
    """Where the script of a page draws the plot of that name; drawn: the plotly figure, whose height it gets."""
    height = drawn.layout["height"]
    return (
        f"<figure><h3>{html.escape(title)}</h3><figcaption>{html.escape(caption)}</figcaption>"
        f'<div class="plot" id="{name}" style="height:{height:g}px"></div></figure>'
    )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def json_in_html(value: Any) -> str:
    """JSON that no tag, comment or entity can begin or end in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
