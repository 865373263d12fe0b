"""Durable hand-over between services; base.py is the contract."""
