"""Plans of the jobs that settings files of other frameworks make, for `import-plan`."""
