"""Plain counters that the engine and the driver count into, and the Prometheus exporter over them."""
