"""Models and plans as users write them: keys, checks, presets, and Hugging Face configuration files."""
