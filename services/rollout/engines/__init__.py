"""What a rollout worker samples from: the contract, SGLang, and an in-memory twin."""
