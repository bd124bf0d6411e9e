"""The suites, one file or folder each."""
