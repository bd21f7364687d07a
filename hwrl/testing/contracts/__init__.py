"""The contracts of every backend, as pytest classes; import them from :mod:`hwrl.testing`."""
