"""The `serve` command."""
