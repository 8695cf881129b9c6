"""What Bestiary says to people. Results go to standard output; notes, warnings and progress to standard error."""

import sys

from rich.console import Console

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


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3700 -> 1h01m."""
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
