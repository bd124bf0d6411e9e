"""The demo's configurations, report and table."""
