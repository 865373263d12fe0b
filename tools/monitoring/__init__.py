"""What Prometheus and Grafana are given under deploy/monitoring, read as data and compared with the code."""
