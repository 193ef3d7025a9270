"""The engine: what happens between two log points, and in which order."""
