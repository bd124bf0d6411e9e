"""What operators deploy beside the service: dashboards, alerts and Prometheus' configuration."""
