"""How a step is saved."""
