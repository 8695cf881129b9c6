"""Self-contained HTML pages: images and videos are embedded, and nothing is loaded over the network."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from bestiary.utils import safe_files

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, .text { text-align: left; }
.text { white-space: normal; min-width: 9rem; }
img, video { max-width: 100%; height: auto; background: white; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-end; }
figure { margin: 0; max-width: 100%; } figure.small-figure { width: 18rem; }
figcaption { font-size: .85rem; opacity: .8; }
.small-figure img, .small-figure video { width: 100%; image-rendering: pixelated; }
pre { overflow-x: auto; padding: .7rem; background: #8881; font-size: .85rem; }
.small { font-size: .85rem; opacity: .8; }
"""
# This policy makes the browser block every network request of the page.
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
MIME_TYPES = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4"}


def render_page(title: str, sections: Iterable[str]) -> str:
    """Return a complete HTML page. `sections` contains HTML texts."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            *sections,
            "</body></html>\n",
        ]
    )


def render_table(header: Sequence[str], body: Iterable[Iterable[str]], anchors: Iterable[str] = ()) -> str:
    """Return an HTML table.

    If `anchors` is given, the first cell of row k is a link to the element of the page whose ID is `anchors[k]`. If at
    least one cell of a column contains ", " (a list), the column is left-aligned and its long cells are broken into
    several lines. Cells of other columns are never broken.
    """
    rows = [[html.escape(cell) for cell in cells] for cells in body]
    for row, anchor in zip(rows, anchors, strict=False):
        row[0] = f'<a href="#{html.escape(anchor)}">{row[0]}</a>'
    classes = [' class="text"' if any(", " in cell for cell in column) else "" for column in zip(*rows, strict=True)]
    classes = classes or [""] * len(header)
    header_cells = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(header, classes, strict=True))
    row_cells = ["".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, classes, strict=True)) for row in rows]
    body_rows = "\n".join(f"<tr>{cells}</tr>" for cells in row_cells)
    return f'<div class="wide"><table><thead><tr>{header_cells}</tr></thead>\n<tbody>{body_rows}</tbody></table></div>'


def render_image(png: bytes, title: str) -> str:
    """Return an <img> element in which a PNG image is embedded."""
    return f'<img alt="{html.escape(title)}" src="{data_url(png, ".png")}">'


def render_figure(path: Path, caption: str, small: bool = False) -> str:
    """Return a <figure> element that contains the image or video in the file `path`, with a caption below it."""
    source = data_url(safe_files.read_bytes(path), path.suffix)
    text = html.escape(caption)
    kind = ' class="small-figure"' if small else ""
    if path.suffix == ".mp4":
        media = f'<video controls loop muted playsinline src="{source}"></video>'
    else:
        media = f'<img alt="{text}" src="{source}">'
    return f"<figure{kind}>{media}<figcaption>{text}</figcaption></figure>"


def render_details(summary: str, text: str) -> str:
    """Return a <details> element: a click on `summary` shows the preformatted `text`."""
    return f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"


def data_url(content: bytes, suffix: str) -> str:
    """Return a data URL that contains the content of a file. The suffix determines the MIME type."""
    return f"data:{MIME_TYPES[suffix]};base64,{base64.b64encode(content).decode()}"
