"""Every setting of a run, torch-free. `presets.parse` reads the command line; `arm`, `loss` and `guard` hold a subject
each, `run` the others and the whole; `checks` is the one checker, `refused` the names that are others here."""
