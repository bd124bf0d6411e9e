"""Errors of the command line. Each message is one line and names what to do."""

import os


class CliError(Exception):
    """Base of the expected errors of a command, which then ends with `exit_code`."""

    exit_code = 2


class UnknownVariable(CliError):
    """The environment has a variable with kvrecall's prefix that is no setting."""


class BadSetting(CliError):
    """A setting has a value that it does not accept."""


class BadResultFile(CliError):
    """A file is not a result file (`kvrecall_server.reporting.results`)."""


class BadReplayFile(CliError):
    """A file is in no format that replay reads, or is malformed."""


class BadCalibrationText(CliError):
    """A calibration text cannot be read or is too short."""


class ServerNotReady(CliError):
    """A started or named server does not answer."""


class CannotServe(CliError):
    """The model, the data directory or the address cannot be used."""


class BadSessionFile(CliError):
    """A file is not an exported session, is damaged, or does not fit this data directory."""


class CannotCheck(CliError):
    """The data to check is in use or cannot be read at all."""


class BoundExceeded(CliError):
    """A layer held more rows than its budget and a block: an invariant of the engine is broken."""

    exit_code = 1


def describe_os_error(error: OSError) -> str:
    """The system's words for an error, without the address, which asyncio and socket add."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
