"""Bus loop, lifecycle, clock, limits, errors, logs and metrics: knows no service."""
