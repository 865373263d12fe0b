"""One machine, one run: start every process, watch it, and leave nothing behind."""
