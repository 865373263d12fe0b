"""deploy/k8s and docker-compose.yml, rendered and judged: for `make k8s-check`, `make compose-check` and tests."""
