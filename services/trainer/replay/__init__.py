"""Make archived updates again from a kept state, and find the first number that does not come out as it was logged."""
