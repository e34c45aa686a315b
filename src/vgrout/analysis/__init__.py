"""Many runs: studies in files, sweeps over them, and what their numbers say together."""
