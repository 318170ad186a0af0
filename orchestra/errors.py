"""Errors that are answers: one short message for the person at the command line, no traceback.

Any exception whose class sets `answers_user = True` is shown as its message alone, with exit code 2. Code that
does not import `orchestra` (data modules, methods) marks its own exceptions the same way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """What was asked cannot be done; the message says what was given and what is allowed."""

    answers_user = True


class Interrupted(BaseException):
    """A signal asked the run to stop. A `BaseException`, so that no handler of ordinary errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process ended by a signal."""
        return 128 + self.signum


def answers_user(error: BaseException) -> bool:
    """Whether `error` is meant to be read by the user as it is."""
    return bool(getattr(error, "answers_user", False))


def nearest(name: str, allowed: Iterable[str], *, limit: int = 8) -> str:
    """A sentence that offers the allowed names closest to `name`, or the first few when none is close."""
    names = sorted(set(allowed))
    if not names:
        return "Nothing is allowed here."
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(repr(c) for c in close) + "?"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"Allowed: {', '.join(names[:limit])}{more}."
