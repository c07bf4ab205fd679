"""Orders of each stage's work: 1F1B, GPipe, ZB-H1, and the splitting of backwards."""
