"""What Bestiary says to people. Results go to standard output; notes, warnings and progress to standard error."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")

# Tables that go to a file or a pipe are not cut to the width of a terminal.
stdout = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)


def note(text: str) -> None:
    stderr.print(text, markup=False, style="dim")


def warn(text: str) -> None:
    stderr.print(f"warning: {text}", markup=False, style="yellow")


def interactive() -> bool:
    """Whether a person is watching: a terminal that can redraw its last line."""
    return sys.stderr.isatty() and stderr.is_terminal and not stderr.is_dumb_terminal


def tracked(items: Iterable[Item], doing: str, total: int) -> Iterator[Item]:
    """The items, with a bar that shows how many of them there have been; plain lines where nobody watches."""
    with Progress(console=stderr, disable=not interactive(), transient=True) as progress:
        bar, said = progress.add_task(doing, total=total), time.monotonic()
        for count, item in enumerate(items):
            if not interactive() and time.monotonic() - said > 10:
                said = time.monotonic()
                note(f"{doing}: {count} of {total}")
            yield item
            progress.update(bar, completed=count + 1)


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def plain_number(number: float) -> str:
    """0.123, -20.4, 12345: games count in ones or in ten thousands, and nobody reads 1.234e+04."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def duration(seconds: float) -> str:
    """3700 -> 1h01m."""
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
