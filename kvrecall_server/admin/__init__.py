"""Offline administration: consistency checks and session archives of a service that is stopped."""
