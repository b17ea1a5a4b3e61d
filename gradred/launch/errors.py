"""What the command says in one line, and leaves with exit code 2."""


class UsageError(Exception):
    """The command line cannot be followed: a word is unknown or out of range, or a thing missing."""
