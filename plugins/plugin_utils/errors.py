# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a user can cause and mend. Any other exception is a bug, and shows as one."""

from __future__ import annotations


class UserError(Exception):
    """Its text names the object and what is wrong with it; `akp` and the action plugins print it and end."""

    @property
    def sentence(self) -> str:
        """The text as the message of a task has it."""
        return str(self) or type(self).__name__


def described(error: BaseException) -> str:
    """What to tell a user: of a file, which it is."""
    if isinstance(error, UserError):
        return error.sentence
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
