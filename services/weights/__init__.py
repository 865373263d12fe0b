"""Weight synchronisation: every engine serves the newest version that it has been proven to serve."""
