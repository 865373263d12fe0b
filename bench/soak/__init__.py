"""Fifty thousand trajectories through ingest and reward to a trainer that trains nothing: what grows, leaks."""
