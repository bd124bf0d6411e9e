"""The demo: a generated conversation in several configurations, its summary and report."""
