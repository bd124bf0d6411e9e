"""The catalog on Redis: one server, Sentinel or Cluster."""
