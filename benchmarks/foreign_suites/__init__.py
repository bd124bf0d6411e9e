"""Test suites of other servers, run against kvrecall."""
