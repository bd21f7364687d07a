"""hwrl inside verl: a checkpoint engine, a platform and a training engine, selected by verl's own settings.

docs/verl.md has the settings. verl imports ``hwrl_verl.platform`` by an entry point.
"""

__all__: list[str] = []
