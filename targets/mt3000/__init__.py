"""The MT-3000's own parts: machine files, on-chip tiles, their search, their proof, their kernels."""
