"""Preferences over REST: reading and changing them, trying a change on what was trained on, and their audit log."""
