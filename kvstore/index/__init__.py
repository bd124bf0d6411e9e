"""Search of a session's keys by inner product: a host arena of its rows, and indexes over them."""
