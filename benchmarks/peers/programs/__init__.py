"""Server processes of peers, each for an environment of its own: they import nothing of kvrecall."""
