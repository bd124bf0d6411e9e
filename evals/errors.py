"""Errors of the quality suites. The command line shows the message as one line and exits."""

from kvrecall_server.app.errors import CliError


class EvalError(CliError):
    """Base of all errors of this package."""


class BadConfig(EvalError):
    """A run configuration names no method, or a setting or a build that does not fit the method."""


class BadBudget(EvalError):
    """A budget is neither a number of rows nor a share of the history, or leaves no row."""


class BadCodec(EvalError):
    """A codec does not exist, or the suite cannot compare codecs."""


class BadDataFile(EvalError):
    """A file with recorded conversations is missing, or not in the format that the suite reads."""


class BadExample(EvalError):
    """An example cannot be made with the requested sizes."""


class BadJournal(EvalError):
    """A journal cannot be read."""


class BadCommand(EvalError):
    """The command of a result file cannot be run again."""


class BadSuite(EvalError):
    """A suite does not exist, or its settings do not fit it."""


class UnitFailed(EvalError):
    """A unit of work failed; records of the units before it are in the journal."""

    exit_code = 1
