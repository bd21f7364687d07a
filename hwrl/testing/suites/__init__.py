"""The test modules of ``hwrl conformance``, one for each kind of subject."""
