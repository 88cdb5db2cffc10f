"""What a command ends with: exit codes of the process, and errors told to the user."""

from typing import Final

OK: Final = 0
NOT_READY: Final = 1
INTERRUPTED: Final = 130


class CliError(Exception):
    """Told to the user as one line; `exit_code` of the process."""

    exit_code = 1


class UsageError(CliError):
    """What was asked for makes no sense, or a file that was given can't be used."""

    exit_code = 2
