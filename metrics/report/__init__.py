"""A run's report as one HTML page, made from its folder alone."""
