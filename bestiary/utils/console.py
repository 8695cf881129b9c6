"""Console output: results go to standard output; notes, warnings and progress go to standard error."""

import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 10.0  # time between two lines of progress if there is no terminal


class MessageConsole(Console):
    """A console whose output failures are ignored, so that they cannot end a training run.

    Output fails, for example, if the log file is on a full disk, if the reader of a pipe has ended (`| head`), or if
    the terminal was closed.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        # ValueError: the stream is closed, or a character cannot be encoded. RuntimeError: a signal handler prints
        # while the interrupted main program is also printing.
        except (OSError, ValueError, RuntimeError):
            del self._buffer[:]

    def on_broken_pipe(self) -> None:
        """Drop the text that cannot be written. The overridden method would end the process."""
        del self._buffer[:]


# sys.stdout is None if the parent process has closed the stream.
_is_terminal = sys.stdout is not None and sys.stdout.isatty()
# If the output goes to a file or a pipe, tables may be 200 characters wide.
stdout = Console(soft_wrap=True, highlight=False, width=None if _is_terminal else 200)
stderr = MessageConsole(stderr=True, soft_wrap=True, highlight=False)


def printable(text: str) -> str:
    """Escape the control characters of a text, so that a text from a file cannot send commands to the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode() for c in text
    )


def valid_text(name: str) -> str:
    """Escape the bytes of a file name that are not valid UTF-8. Python cannot write or draw them as text."""
    return name.encode(errors="backslashreplace").decode()


def escape_warnings() -> None:
    """Make Python escape control characters in warnings: Matplotlib's warnings may contain characters of run names."""

    format_warning = warnings.formatwarning
    if getattr(format_warning, "__name__", "") == "format_escaped":  # this function was called before
        return

    def format_escaped(*arguments: Any, **options: Any) -> str:
        return printable(format_warning(*arguments, **options))

    warnings.formatwarning = format_escaped


def note(text: str) -> None:
    """Print an informational message to standard error.

    Most messages have no prefix. The caller adds the prefix "note: " if the user may not expect what the message says.
    Serious problems are warnings instead.
    """
    stderr.print(printable(text), markup=False, style="dim")


def warn(text: str) -> None:
    """Print a warning to standard error. The prefix "warning: " is added."""
    stderr.print(f"warning: {printable(text)}", markup=False, style="yellow")


def print_line(text: str) -> None:
    """Print a line to standard output, for example the path of a new file, with control characters escaped.

    Do nothing if code of an environment has closed the stream.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        print(printable(text))


@dataclass(frozen=True)
class TextTable:
    """A table as text, which can be printed or shown on an HTML page. Captions are lines below the table."""

    title: str
    header: list[str]
    rows: list[list[str]]
    captions: list[str]


def print_table(table: TextTable, left: Collection[str] = ("task", "group", "run names", "variant", "X", "Y")) -> None:
    """Print a table to standard output.

    Columns with a header in `left` are left-aligned, all others are right-aligned.
    """
    caption = "\n".join(table.captions) or None
    rich_table = Table(title=plain(table.title), caption=plain(caption or "") or None, caption_justify="left")
    for column in table.header:
        rich_table.add_column(plain(column), justify="left" if column in left else "right")
    for cells in table.rows:
        rich_table.add_row(*map(plain, cells))
    stdout.print(rich_table, markup=False)


def plain(text: str) -> Text:
    """Return a `rich` text that shows square brackets as they are, not as markup. Escape control characters."""
    return Text(printable(text))


def is_interactive() -> bool:
    """Return whether standard error is a terminal that can redraw its last line."""
    return sys.stderr.isatty() and stderr.is_terminal and not stderr.is_dumb_terminal


def progress_bar(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Yield the items and show a progress bar with the time left.

    Without a terminal, print a line of text every SECONDS_BETWEEN_LINES instead.
    """
    with Progress(console=stderr, disable=not is_interactive(), transient=True) as progress:
        bar = progress.add_task(description, total=total)
        start = last_printed = time.monotonic()
        for count, item in enumerate(items):
            if not is_interactive() and time.monotonic() - last_printed > SECONDS_BETWEEN_LINES:
                last_printed = time.monotonic()
                remaining = (last_printed - start) / max(count, 1) * (total - count)
                note(f"{description}: {count} of {total} · {format_duration(remaining)} left")
            yield item
            progress.update(bar, completed=count + 1)


def format_count(number: float) -> str:
    """Format a number with 3 significant digits and one of the suffixes k, M, G: 1234567 -> 1.23M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def format_number(number: float) -> str:
    """Format a return or a score with 4 significant digits, or as an integer if it is 1000 or more."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def plural(count: int, noun: str) -> str:
    """Format a number of things: 1 game, 2 games."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_duration(seconds: float) -> str:
    """Format a duration: 3700 s -> 1h01m. Below one hour, use minutes and seconds: 75 s -> 1m15s."""
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
