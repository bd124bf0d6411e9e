"""`kvrecall eval`: quality suites, their options, and the run that they share."""
