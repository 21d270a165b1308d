"""Errors that are the caller's."""


class UsageError(Exception):
    """Arguments that cannot be used; the message says which ones can."""
