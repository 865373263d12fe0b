"""A judge that fails and stalls by a seeded plan, and what the reward service makes of it."""
