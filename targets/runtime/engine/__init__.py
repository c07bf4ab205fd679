"""Engines that execute a program: ranks, collectives, optimizer, evaluation."""
