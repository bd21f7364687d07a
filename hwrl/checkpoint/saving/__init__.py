"""A save: its stages, the agreement of the ranks, and the memory for copies of a state."""
