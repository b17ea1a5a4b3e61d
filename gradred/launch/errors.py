"""What the command says in one line, and leaves with exit code 2."""


class UsageError(Exception):
    """The command line cannot be followed: a word is wrong or a thing missing."""
