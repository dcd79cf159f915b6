"""Grafana dashboards as data, and the JSON files built from them."""
