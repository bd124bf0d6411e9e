"""Sessions begin and end: creation, forks, deletion."""
