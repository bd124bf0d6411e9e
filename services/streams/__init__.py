"""Streams: the progress of a turn on its way to a reader, and its resumption after a failover."""
