"""Side-by-side benchmarks; README.md says how each figure was made."""
