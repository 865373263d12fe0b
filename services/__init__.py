"""One package for each process; a service imports `sao`, never another service."""
