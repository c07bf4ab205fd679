"""Tile schedules of the MT-3000's on-chip memories, and their proof."""
