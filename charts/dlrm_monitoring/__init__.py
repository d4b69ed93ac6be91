"""What the chart ships for monitoring, as Python: tables of metrics, and Grafana dashboards. Never installed."""
