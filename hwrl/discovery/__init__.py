"""How backends and plugins are found: hooks, entry points, the registry."""
