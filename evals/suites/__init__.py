"""The quality suites, one file or folder each."""
