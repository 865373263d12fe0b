"""A real engine killed while its keeper is in each state: out of rotation, for a reason, and back with the newest."""
