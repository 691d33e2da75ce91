"""The decoding step: pure functions over immutable records. Imports mlx, attrs and nothing else of the project."""
