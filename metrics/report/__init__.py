"""The report of a run as one HTML page, made from the run's folder alone."""
