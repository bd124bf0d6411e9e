"""Grafana's dashboards as code. `python -m observability.dashboards` writes observability/grafana/."""
