"""The two ways in which things go wrong, and what a user sees of each."""


class UserError(Exception):
    """A mistake in what the user asked for: one clear line a problem, exit status 2, before any work starts."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class RunError(Exception):
    """A run that cannot go on (diverged, disk full, broken environment): one line with the cause, exit status 1."""
