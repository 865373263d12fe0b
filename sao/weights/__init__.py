"""Weight versions as files: manifest and store, shared by the trainer (writes) and the weight-sync service (reads)."""
