"""Suite repository: function names removed from call sites of Python's standard library."""
