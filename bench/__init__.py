"""Scripts behind every number in the docs."""
