"""Prove what docs/engine.md promises of weight updates: failures, a fleet under load, and how long they take."""
