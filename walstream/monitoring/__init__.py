"""What a monitoring system asks a running process: metrics for Prometheus, and whether it is alive and ready."""
