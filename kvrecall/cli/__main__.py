"""`python -m kvrecall.cli`: the command line without its script."""

from kvrecall.cli import app

app()
