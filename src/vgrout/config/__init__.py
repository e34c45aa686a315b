"""Every setting of a run, torch-free. `presets.parse` reads the command line; `arm`, `loss` and `guard` hold a subject
each, `run` the others and the whole; `checks` is the one checker, `renamed` the names that settings had before."""
