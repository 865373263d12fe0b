"""Alerts, dashboards and scrape configuration (docs/operations.md)."""
