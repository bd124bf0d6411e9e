"""The command line: one module per command, shared options, and the check of installed extras."""
