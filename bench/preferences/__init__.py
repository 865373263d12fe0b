"""Changing preferences while trajectories are scored: `make prove-preferences-api`."""
