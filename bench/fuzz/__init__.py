"""Requests that nobody should send, by the hundred thousand, to the real ingest, reward and weights services."""
