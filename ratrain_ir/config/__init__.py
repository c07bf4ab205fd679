"""Models and plans as users write them: keys, checks, presets, files of other people."""
