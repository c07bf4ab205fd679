"""Advice about memory: changes that free bytes, and what each costs."""
