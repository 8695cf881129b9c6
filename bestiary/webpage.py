"""Pages for people: one HTML file each, with everything in it. Nothing on them is fetched from anywhere."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, .words { text-align: left; }
.words { white-space: normal; min-width: 9rem; }
img, video { max-width: 100%; height: auto; background: white; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-end; }
figure { margin: 0; max-width: 100%; } figure.small-picture { width: 18rem; } figcaption { font-size: .85rem; opacity: .8; }
.small-picture img, .small-picture video { width: 100%; image-rendering: pixelated; }
pre { overflow-x: auto; padding: .7rem; background: #8881; font-size: .85rem; }
.small { font-size: .85rem; opacity: .8; }
"""
# browsers refuse any request from such a page
ALONE = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
TYPES = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4"}


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page around its parts."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{ALONE}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def table(names: Sequence[str], body: Iterable[Iterable[str]], links: Iterable[str] = ()) -> str:
    """`links` are the places on the page that the rows' first cells lead to. Lists of words are broken into lines."""
    rows = [[html.escape(cell) for cell in cells] for cells in body]
    for row, link in zip(rows, links, strict=False):
        row[0] = f'<a href="#{html.escape(link)}">{row[0]}</a>'
    kinds = [' class="words"' if any(", " in cell for cell in column) else "" for column in zip(*rows, strict=True)]
    kinds = kinds or [""] * len(names)
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(names, kinds, strict=True))
    cells = ["".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in rows]
    filled = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{filled}</tbody></table></div>'


def image(png: bytes, title: str) -> str:
    return f'<img alt="{html.escape(title)}" src="{data_url(png, ".png")}">'


def picture(path: Path, caption: str, small: bool = False) -> str:
    """A picture or movie from a file, with a line below it."""
    source, text = data_url(path.read_bytes(), path.suffix), html.escape(caption)
    kind = ' class="small-picture"' if small else ""
    if path.suffix == ".mp4":
        shown = f'<video controls loop muted playsinline src="{source}"></video>'
    else:
        shown = f'<img alt="{text}" src="{source}">'
    return f"<figure{kind}>{shown}<figcaption>{text}</figcaption></figure>"


def details(summary: str, text: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"


def data_url(content: bytes, suffix: str) -> str:
    return f"data:{TYPES[suffix]};base64,{base64.b64encode(content).decode()}"
