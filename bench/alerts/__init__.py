"""A real Prometheus over a real run: `python -m bench.alerts`."""
