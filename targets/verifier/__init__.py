"""Proofs about programs: routines, races, and the schedule that a program lifts back to."""
