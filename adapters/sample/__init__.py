"""The `sample` command."""
