# vgrout's recipes: `just` lists them. `uv run just NAME` works without anything installed but uv.

py := "uv run python -m"

default:
    @just --list --unsorted

# lint, types, the quick tests (a few minutes)
check:
    uv run ruff check .
    uv run ruff format --check .
    uv run ty check src organisms studies benchmarks
    uv run pytest

# the tests of whole runs and programs, up to a minute each (a quarter of an hour)
check-long:
    uv run pytest -m "long and not slow"

# the tests that take minutes each
check-slow:
    uv run pytest -m slow

# the whole pipeline, twelve steps (half a minute)
fast-dev-run *flags:
    {{py}} vgrout.train smoke --intervention=route2 --steps 12 --checkpoint-every 5 {{flags}}

# a run from end to end on this machine: demonstrations, refreshes, evaluations, checkpoint, guard (one to two minutes); --intervention NAME: another method
smoke *flags:
    {{py}} vgrout.train smoke {{flags}}

# the same without intervention
smoke-vanilla *flags: (smoke "--intervention=none" flags)

# the same with the hack-ward part of the gradient erased
smoke-projected *flags: (smoke "--intervention=erase" flags)

# the documents' four interventions, twice: caches cold, then warm, in a new folder below out/ (eight minutes)
smoke-all *flags:
    #!/usr/bin/env bash
    set -euo pipefail
    mkdir -p out
    folder=$(mktemp -d "$PWD/out/smoke-all.XXXXXX")
    cd "$folder"  # caches are relative to it: those of other runs stay as they are
    for name in none erase route route2 none erase route route2; do
        uv run --project "{{justfile_directory()}}" python -m vgrout.train smoke --intervention=$name {{flags}}
    done
    echo "runs and caches: $folder"

# SmolLM2-135M from download to report and export, under plain GRPO and route2 (half an hour on two cores)
small:
    test -e out/models/smollm2 || uv run vgrout download smollm2
    test -e out/organisms/smollm2 || uv run vgrout organism tune
    for name in none route2; do {{py}} vgrout.train small --intervention=$name --out-tag=_path || exit 1; done
    {{py}} vgrout.report out/runs --tag _path --out out/small
    {{py}} vgrout.export "$(ls -td out/runs/*_small_route2_seed41_path | head -n 1)" --out out/small-deployed

# the same model in another world, sums under three flawed checks: from download to report, under plain GRPO and route2
sums:
    test -e out/models/smollm2 || uv run vgrout download smollm2
    test -e out/organisms/sums || uv run vgrout organism sums
    for name in none route2; do {{py}} vgrout.train sums --intervention=$name --out-tag=_path || exit 1; done
    {{py}} vgrout.report out/runs/*_sums_*_path --out out/sums

# the tutorial's study, and its picture: docs/figures/two-methods.png is a copy of it (seven minutes)
tutorial:
    {{py}} vgrout.sweep studies/tutorial.toml
    {{py}} vgrout.report out/sweeps/tutorial
    @echo "picture: out/sweeps/tutorial/report/figures/dynamics.png"

# every run of studies/NAME.toml, resumable, a core or a GPU each, on what studies/prepare.sh makes first; --dry-run says how many (exit code 2 until the bases are made)
study name *flags:
    {{ if flags =~ "--dry-run|--help" { "true" } else { "studies/prepare.sh " + name } }}
    {{py}} vgrout.sweep studies/{{name}}.toml {{flags}}

# an organism that has begun to hack: the shipped one, or another build, after 15 steps of plain GRPO
warm seed="40" to="out/warm" organism="src/vgrout/organism/data":
    studies/prepare.sh warm {{seed}} {{to}} {{organism}}

# the direction from the organism's pairs: spectra, held-out pairs (seconds)
extract *flags:
    {{py}} vgrout.direction --model organism {{flags}}

# Qwen3-4B (or another hub id) into the hub's cache: 8 GB, minutes; one line where there is no network
download-model id="Qwen/Qwen3-4B":
    uv run vgrout download model {{id}}

# the benchmark's problem files into out/data, checked against their git ids (15 MB, seconds)
download-data:
    uv run vgrout download data

# the hand-written pairs as a file, where the preset `fast` looks for its pairs; one that is there is left (a second)
pairs-file:
    #!/usr/bin/env bash
    set -euo pipefail
    file=out/pairsets/prog_wide.json
    if [ -e "$file" ] || [ -L "$file" ]; then
        echo "$file is there already; move it away to have the hand-written pairs there" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$file")"
    # opened only once the pairs are there, and only if it is new
    uv run python -c "
    from vgrout.direction.pairs import handwritten
    pairs = handwritten().to_json()
    print(pairs, file=open('$file', 'x'))"

# a pool of a teacher's own answers to N problems, 8 each (Qwen3-4B on a GPU: about 20 s a problem)
pregen-teacher n *flags:
    {{py}} vgrout.teacher --n-problems {{n}} {{flags}}

# elicit-then-strip: the pool of `fast`, 6 problems a mode (Qwen3-4B on a GPU: about half an hour; goes on after a kill)
build-substrate *flags:
    uv run vgrout substrate {{flags}}

# go or no-go of `fast` on this pool: mixed from it, the student hacks by itself within ten steps (about 5 minutes)
probe-mixed *flags:
    {{py}} vgrout.train fast --intervention=none --steps 10 --eval-ablate-every 0 --guard log --final-n-prompts 8 --final-samples 1 --out-tag=_probe {{flags}}
    uv run python studies/probe_mixed.py

# every method and the ceiling at the benchmark's scale, five seeds, in a pueue queue (hours a run)
queue-full *flags:
    {{py}} vgrout.sweep studies/full.toml --via pueue {{flags}}

# the documents as a site in out/site, strictly: a dead link is an error (seconds)
site:
    uv run python docs/reference.py
    NO_MKDOCS_2_WARNING=1 uv run --group docs mkdocs build --strict

# the notebooks of examples/, run again in a Jupyter kernel, with what their cells show (a minute)
notebooks:
    uv run --group clients python tests/notebooks.py

# record the golden runs again (a minute); explain the diff in CHANGELOG.md
golden:
    uv run python tests/golden.py
