"""The `sao` command."""
