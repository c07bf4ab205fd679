"""Readers of settings files of other frameworks, each as a `Job`: for `fit`."""
