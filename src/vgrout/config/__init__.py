"""Every setting of a run, torch-free. `presets.resolve` reads the command line; `method`, `loss`, `guard`
hold a subject each, `run` the rest and the whole; `checks` is the one checker, `names` has what is called otherwise
here."""
