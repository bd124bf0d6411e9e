"""What can go wrong in a suite. The command line shows the message as one line and ends."""

from kvrecall.app.errors import CliError


class EvalError(CliError):
    """Base of all errors of this package."""


class BadArm(EvalError):
    """What is to be compared names no method, or a setting or a build that does not fit it."""


class BadBudget(EvalError):
    """A budget is neither a number of rows nor a share of the history's length, or is too small for any row."""


class BadCodec(EvalError):
    """Rows are to be stored in a way that there is not, or that the suite does not compare."""


class BadDataFile(EvalError):
    """A file with recorded conversations is missing, or not in the form that the suite reads."""


class BadExample(EvalError):
    """An example cannot be made as it was asked for."""


class BadJournal(EvalError):
    """A journal cannot be read."""


class BadSuite(EvalError):
    """A suite is asked for that there is not, or with settings that do not fit it."""


class UnitFailed(EvalError):
    """A unit of work broke off; what was done before it stands in the journal."""

    exit_code = 1
