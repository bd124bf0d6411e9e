"""One session's keys, which share a slot: its commits, and the scripts that apply them."""
