"""Exceptions for which the command line prints a message instead of a traceback."""


class UserError(Exception):
    """The user's input is invalid. The command line prints one line per problem and exits with status 2."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class RunError(Exception):
    """A run cannot continue, for example because training diverged, the disk is full or an environment failed.

    The command line prints one line with the cause and exits with status 1.
    """
