"""Plain counters of engine and driver, and their Prometheus exporter."""
