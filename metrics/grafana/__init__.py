"""Grafana dashboards: what they show as data, and the JSON files that are built from it."""
