"""hwrl inside verl: a checkpoint engine (weight transfer), a platform (devices) and a training engine.

verl's own settings select them; docs/verl.md has the settings. verl imports ``hwrl_verl.platform`` by an entry point,
and the other modules by its settings.
"""

__all__: list[str] = []
