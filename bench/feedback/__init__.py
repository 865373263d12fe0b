"""Feedback that comes three minutes late, on a real run: what becomes of it, and whether anything waits for it."""
