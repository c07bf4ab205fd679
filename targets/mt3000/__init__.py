"""What only the MT-3000 has: its machine files, its on-chip tiles, their search and their proof."""
