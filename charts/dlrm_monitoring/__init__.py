"""Grafana dashboards of the chart, as Python. Never installed."""
