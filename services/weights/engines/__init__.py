"""Engine control: the contract in base.py, SGLang over HTTP, and an in-memory twin with the real one's oddities."""
