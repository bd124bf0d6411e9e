"""What can go wrong on the command line. The message is one line that says what to do."""


class CliError(Exception):
    """Base of all errors of this package; the command ends with `exit_code`."""

    exit_code = 2


class BadResultFile(CliError):
    """A file is not in the form of design section 9."""


class BadReplayFile(CliError):
    """A file is in none of the forms that replay reads, or breaks its form."""


class BadCalibrationText(CliError):
    """A text to measure the layers on cannot be read, or is too short."""


class ServerNotReady(CliError):
    """A server that was started, or that was named, does not answer."""


class CannotServe(CliError):
    """The model, the data directory or the address cannot be used."""


class BadSessionFile(CliError):
    """A file is no exported session, or is damaged, or cannot be imported here."""


class CannotCheck(CliError):
    """What is to be checked is in use, or cannot be read at all."""


class BoundExceeded(CliError):
    """A layer held more rows than its budget and a block: an invariant of the engine is broken."""

    exit_code = 1
