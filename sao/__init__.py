"""Single-rollout asynchronous optimization: what the services share, and what users extend."""
