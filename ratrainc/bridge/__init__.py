"""Between the settings of other frameworks and plans: `import-plan`, and the formats `megatron` and `torchtitan` of `export`."""
