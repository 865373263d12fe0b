"""The door: validates finished trajectories, makes them durable, and hands out prompt leases."""
