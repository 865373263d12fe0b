"""What every process shows of itself: structured logs, health, and metrics over HTTP."""
