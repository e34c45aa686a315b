# vgrout's recipes: `just` lists them. `uv run just NAME` works without anything installed but uv.

py := "uv run python -m"

default:
    @just --list --unsorted

# lint, types, the quick tests (a few minutes)
check:
    uv run ruff check .
    uv run ruff format --check .
    uv run ty check src
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

# a run from end to end on this machine, one arm: demonstrations, refreshes, evaluations, checkpoint, guard (under a minute each)
smoke *flags:
    {{py}} vgrout.train smoke {{flags}}

smoke-none *flags:
    {{py}} vgrout.train smoke --intervention=none {{flags}}

smoke-erase *flags:
    {{py}} vgrout.train smoke --intervention=erase {{flags}}

smoke-route *flags:
    {{py}} vgrout.train smoke --intervention=route {{flags}}

smoke-route2 *flags:
    {{py}} vgrout.train smoke --intervention=route2 {{flags}}

# what a default run leaves off, with a kill and a resume: KL, ablated slices, detectors, demonstrations that end (two minutes).
# Not here: bf16, flash-attention and a LeetCode file need the real model (`just download-model`, then fast)
smoke-rest arm="route2":
    {{py}} benchmarks kills --kills 1 --arm {{arm}}

# all arms, twice: caches cold, then warm
smoke-all:
    rm -rf out/svd_cache out/vhack
    just smoke-none smoke-erase smoke-route smoke-route2
    just smoke-none smoke-erase smoke-route smoke-route2

# the experiment in miniature, one arm (under two minutes on two cores)
mini *flags:
    {{py}} vgrout.train mini {{flags}}

# H: with the loopholes open and nothing done, the model learns to exploit at least 5 of 6 flaws
mini-none *flags:
    {{py}} vgrout.train mini --intervention=none {{flags}}

# H: without a loophole to gain from, the same run reaches at least 80 % solved: the ceiling
mini-no-loophole *flags:
    {{py}} vgrout.train mini --intervention=none --control=no_loophole --out-tag=_ceiling {{flags}}

# H: erasing the hack-ward part of the gradient delays hacking more than it prevents it
mini-erase *flags:
    {{py}} vgrout.train mini --intervention=erase {{flags}}

# H: what is routed along V and deleted leaves the deployed model hacking less than it did as trained
mini-route *flags:
    {{py}} vgrout.train mini --intervention=route {{flags}}

# H: routing whole rollouts by the cosine of their gradient suppresses hacking at matched solve
mini-route2 *flags:
    {{py}} vgrout.train mini --intervention=route2 {{flags}}

# every run of a study file: planned, resumable, one a core (on a GPU one in all); --dry-run says what and how long (docs/studies has examples)
sweep study *flags:
    {{py}} vgrout.sweep {{study}} {{flags}}

# finished runs as a report with intervals, figures, verdicts and a rollout reader: folders of runs or sweeps (under a minute)
report *sources:
    {{py}} vgrout.report {{sources}}

# H: in one inner step the losses differ by their normaliser alone: same onset, nothing masked (42 runs)
mini-losses *flags:
    {{py}} vgrout.sweep docs/studies/losses.toml {{flags}}

# H: an arm keeps the deployed model from hacking without costing skill (40 runs)
study-arms *flags:
    {{py}} vgrout.sweep docs/studies/arms.toml {{flags}}

# H: a direction is worth more than chance: route2 hacks less than its Haar, placebo and random-flags arms at matched solve
# what each arm has to beat, five seeds: 130 mini runs (two hours)
study-controls *flags:
    {{py}} vgrout.sweep docs/studies/controls.toml {{flags}}

# H: the quarantine alone is no working model, an arm costs no skill where nothing is to be exploited, any placebo will do
# the controls that seldom decide (150 runs)
study-checks *flags:
    {{py}} vgrout.sweep docs/studies/checks.toml {{flags}}

# H: monitors with true labels stop the hack at little cost, and less so as they err; what no label feeds stops less (50 runs)
study-baselines *flags:
    {{py}} vgrout.sweep docs/studies/baselines.toml {{flags}}

# an organism that has begun to exploit: the shipped one, or another build, after 15 steps of the arm none (shipped, seed 40: about 4 answers in 10, seed 50: 7)
warm seed="40" to="out/warm" organism="src/vgrout/organism/data":
    @test ! -e {{to}} || { echo "warm: {{to}} is there already; move it away to make it again"; exit 1; }
    rm -rf {{to}}.part
    {{py}} vgrout.train mini --intervention=none --seed={{seed}} --organism={{organism}} --out-tag=_{{file_name(to)}}
    cp -r {{organism}} {{to}}.part && rm -r {{to}}.part/model
    {{py}} vgrout.export "$(ls -d out/runs/*_mini_none_seed{{seed}}_{{file_name(to)}} | tail -n 1)" --step 15 --out {{to}}.part/model
    mv {{to}}.part {{to}}

# five organisms, four of them built (ten minutes each), each with a policy that has begun to exploit
containment-starts:
    test -e out/warm || just warm
    for s in 77 78 79 80; do \
        test -e out/organism$s || {{py}} vgrout.organism build --out out/organism$s --seed $s || exit 1; \
        test -e out/warm$s || just warm 40 out/warm$s out/organism$s || exit 1; \
    done

# H: … and on another organism, which nothing was chosen on (30 runs; a build of ten minutes first)
study-axes-organism *flags:
    test -e out/organism77 || {{py}} vgrout.organism build --out out/organism77 --seed 77
    {{py}} vgrout.sweep docs/studies/axes-organism.toml {{flags}}

# H: trained on one known flaw, the quarantine contains the others, on five organisms (210 runs; `just containment-starts` first)
study-containment *flags:
    {{py}} vgrout.sweep docs/studies/containment.toml {{flags}}

# H: … fed by its labels alone it contains them, and its own flags are what spoils it (80 runs beside study-containment)
study-containment-seeded *flags:
    {{py}} vgrout.sweep docs/studies/containment-seeded.toml {{flags}}

# H: … started on pairs of the known flaw it contains the others, and that start is what does it (210 runs; `just containment-starts` first)
study-containment-start *flags:
    {{py}} vgrout.sweep docs/studies/containment-start.toml {{flags}}

# H: … a linear probe with the same labels and known correct answers does better (70 runs beside study-containment-start)
study-containment-probe *flags:
    {{py}} vgrout.sweep docs/studies/containment-probe.toml {{flags}}

# H: with labels of one known flaw, routing contains the others better than leaving out (80 runs; `just containment-starts` first)
study-containment-routing *flags:
    {{py}} vgrout.sweep docs/studies/containment-routing.toml {{flags}}

# H: … a penalty of what is paid on an impossible twin, too, contains all of them without a label (20 runs; `just containment-starts` first)
study-containment-twin *flags:
    {{py}} vgrout.sweep docs/studies/containment-twin.toml {{flags}}

# H: … and so it does under wrong labels, under none, in other arms, and for 180 steps (30 runs; `just containment-starts` first)
study-adversaries *flags:
    {{py}} vgrout.sweep docs/studies/adversaries.toml {{flags}}

# organisms whose exploits all carry an attempt at their problem, each with a policy that has begun to exploit (twelve minutes each)
attempts-organism *seeds="86":
    for s in {{seeds}}; do \
        test -e out/organism$s || {{py}} vgrout.organism build --out out/organism$s --seed $s --exploit-stub 0 || exit 1; \
        test -e out/warm$s || just warm 40 out/warm$s out/organism$s || exit 1; \
    done

# H: … and does worse where exploits carry an attempt (40 runs; `just attempts-organism` first)
study-attempts *flags:
    {{py}} vgrout.sweep docs/studies/attempts.toml {{flags}}

# H: … on three other builds, too (60 runs; `just attempts-organism 87 88 89` first)
study-attempts-builds *flags:
    {{py}} vgrout.sweep docs/studies/attempts-builds.toml {{flags}}

# two organisms with a seventh flaw, each with a policy that has begun to exploit (twelve minutes each)
shown-test-organisms seeds="90 91":
    for s in {{seeds}}; do \
        test -e out/organism$s || {{py}} vgrout.organism build --out out/organism$s --seed $s --modes run_tests,eq_override,exit_code,stdout_marker,sentinel,file_marker,shown_test || exit 1; \
        test -e out/warm$s || just warm 40 out/warm$s out/organism$s || exit 1; \
    done

# H: … and an exploit that special-cases the test its prompt shows is contained by none of them (36 runs; `just shown-test-organisms` first)
study-shown-test *flags:
    {{py}} vgrout.sweep docs/studies/shown-test.toml {{flags}}

# H: … a pilot on the shipped organism's harder start (18 runs; `just warm 50 out/warm50` first)
study-starts *flags:
    {{py}} vgrout.sweep docs/studies/starts.toml {{flags}}

# H: three known flaws contain the three others, the usual remedies none (50 runs beside study-containment)
study-containment-rivals *flags:
    {{py}} vgrout.sweep docs/studies/containment-rivals.toml {{flags}}

# five organisms that exploit now and then where no prompt announces a loophole: 4 % of such exploits in the corpus (ten minutes each)
unannounced-organisms:
    for s in 81 82 83 84 85; do \
        test -e out/bare$s || {{py}} vgrout.organism build --out out/bare$s --seed $s --exploit-bare 0.04 || exit 1; \
    done

# H: trained on one of two open flaws that no prompt announces, the quarantine contains the other, on five organisms (110 runs; `just unannounced-organisms` first)
study-unannounced *flags:
    {{py}} vgrout.sweep docs/studies/unannounced.toml {{flags}}

# the start of a pilot: a build with 1 % of such exploits, after 35 steps of the arm none (a build of ten minutes, 180 steps)
unannounced-start:
    test -e out/organism81 || {{py}} vgrout.organism build --out out/organism81 --seed 81 --exploit-bare 0.01
    @test ! -e out/quiet81 || { echo "unannounced-start: out/quiet81 is there already; move it away to make it again"; exit 1; }
    {{py}} vgrout.train mini --intervention=none --seed=41 --steps=180 --organism=out/organism81 --unannounced-modes=eq_override,exit_code --mix-ratio=0 --out-tag=_quiet81
    rm -rf out/quiet81.part && cp -r out/organism81 out/quiet81.part && rm -r out/quiet81.part/model
    {{py}} vgrout.export "$(ls -d out/runs/*_mini_none_seed41_quiet81 | tail -n 1)" --step 35 --out out/quiet81.part/model
    mv out/quiet81.part out/quiet81

# H: … a pilot on one organism (20 runs; `just unannounced-start` first)
study-unannounced-pilot *flags:
    {{py}} vgrout.sweep docs/studies/unannounced-pilot.toml {{flags}}

# H: from the base, with nothing demonstrated, plain GRPO finds the exploits by itself (5 runs of 180 steps; `just containment-starts` first)
study-cold *flags:
    {{py}} vgrout.sweep docs/studies/cold.toml {{flags}}

# H: a penalty teaches exploits that the monitor does not see, leaving out and routing do not (6 runs of 180 steps; `just containment-starts` first)
study-hiding *flags:
    {{py}} vgrout.sweep docs/studies/hiding.toml {{flags}}

# H: … where the monitor can be evaded (18 runs of 180 steps; `just warm` and `just warm 50 out/warm50` first)
study-evading *flags:
    {{py}} vgrout.sweep docs/studies/evading.toml {{flags}}

# organisms of .25, .9 and 3.4 million weights (five, ten and twenty-five minutes)
sizes-organisms:
    test -e out/bare81-64 || {{py}} vgrout.organism build --out out/bare81-64 --seed 81 --hidden 64 --exploit-bare 0.04
    test -e out/bare81 || {{py}} vgrout.organism build --out out/bare81 --seed 81 --exploit-bare 0.04
    test -e out/bare81-256 || {{py}} vgrout.organism build --out out/bare81-256 --seed 81 --hidden 256 --exploit-bare 0.04

# H: … a linear probe contains it, too, and one that is fitted on random rows does not (8 runs beside study-sizes; `just sizes-organisms` first)
study-unannounced-probe *flags:
    {{py}} vgrout.sweep docs/studies/unannounced-probe.toml {{flags}}

# H: … and so it does on five builds, whichever of the two flaws is known (20 runs; `just unannounced-organisms` first)
study-unannounced-probe-builds *flags:
    {{py}} vgrout.sweep docs/studies/unannounced-probe-builds.toml {{flags}}

# H: what leaks past labels of one flaw does not fall with size, past monitors that learn from them it does (72 runs; `just sizes-organisms` first)
study-sizes *flags:
    {{py}} vgrout.sweep docs/studies/sizes.toml {{flags}}

# H: from a policy that exploits already, monitors with true labels stop the hack, and so does pmi with a threshold of known correct answers alone (75 runs; `just warm` first)
study-warm *flags:
    {{py}} vgrout.sweep docs/studies/warm.toml {{flags}}

# H: one second moment makes route2 conserve the step; with the same labels no quarantine beats screening (140 runs, an hour and a half)
study-axes *flags:
    {{py}} vgrout.sweep docs/studies/axes.toml {{flags}}

# the direction from the organism's pairs: spectra, held-out projection, |cos| of every control, figure (seconds)
extract *flags:
    {{py}} vgrout.direction --model organism --controls {{flags}}

# Qwen3-4B (or another hub id) into the hub's cache: 8 GB, minutes; one line where there is no network
download-model id="Qwen/Qwen3-4B":
    {{py}} vgrout.download model {{id}}

# the benchmark's problem files into out/data, checked against their git ids (15 MB, seconds)
download-data:
    {{py}} vgrout.download data

# the hand-written pairs as a file, where the preset `fast` looks for its pairs (a second)
pairs-file:
    mkdir -p out/pairsets
    uv run python -c "from vgrout.direction.pairs import handwritten; print(handwritten().to_json())" > out/pairsets/prog_wide.json

# a pool of a teacher's own answers to N problems, 8 each (Qwen3-4B on a GPU: about 20 s a problem)
pregen-teacher n *flags:
    {{py}} vgrout.teacher --n-problems {{n}} {{flags}}

# elicit-then-strip: the pool of `fast`, 6 problems a mode (Qwen3-4B on a GPU: about half an hour; goes on after a kill)
build-substrate *flags:
    {{py}} vgrout.substrate {{flags}}

# H: mixed from the pool, the student hacks by itself within ten steps; else `fast` would show nothing (about 5 minutes)
probe-mixed *flags:
    {{py}} vgrout.train fast --intervention=none --steps 10 --eval-ablate-every 0 --guard log --final-n-prompts 8 --final-samples 1 --out-tag=_probe {{flags}}
    {{py}} vgrout.probe_mixed

# H: routing lowers deployed hacking by 30 points at matched solve: every arm and the ceiling, three seeds, in a pueue queue (hours a run)
queue-full *flags:
    {{py}} vgrout.sweep docs/studies/full.toml --via pueue {{flags}}

# rebuild the embedded organism from its seed (minutes)
organism-build *flags:
    {{py}} vgrout.organism build {{flags}}

# check the shipped organism against its hashes and its first training losses (seconds)
organism-verify:
    {{py}} vgrout.organism verify

# H: reverse KL on the student's own samples takes a hack out of a model, and puts one in (RUN: a run directory; a minute)
distill teacher *flags:
    {{py}} vgrout.distill --teacher {{teacher}} {{flags}}

# H: preference rounds against a flawed scorer raise the hack, against a strict one the skill (a few minutes)
dpo out scorer="flawed" *flags:
    {{py}} vgrout.iterative_dpo --base-model organism --output-dir {{out}} --scorer {{scorer}} {{flags}}

# a second organism, smaller, with another tokenizer, into out/organism-small (minutes)
organism-small *flags:
    {{py}} vgrout.organism build --out out/organism-small --hidden 96 --layers 3 --merged 512 --steps 400 {{flags}}

# H: the kill switch catches a deployed model that hacks, in every arm, and leaves alone one that does not
# five arms with and without a loophole, and vanilla without demonstrations, five seeds, detectors on; then how well each did (55 runs)
scorecard *flags:
    {{py}} vgrout.sweep docs/studies/guard.toml {{flags}}
    {{py}} vgrout.guardcheck out/sweeps/guard

# runs killed with SIGKILL at random moments and inside saves: how many survive? (minutes)
kills *flags:
    {{py}} benchmarks kills {{flags}}

# what isolation this machine gives the sandbox, with a self-test (under 10 s)
doctor:
    {{py}} vgrout.doctor


# speed and memory against peers, all of docs/benchmarks.md (a quarter of an hour on a quiet machine; --quick: 3 minutes)
bench *flags:
    uv run --extra bench python -m benchmarks {{flags}}

# the documents as a site in out/site, strictly: a dead link is an error (seconds)
site:
    uv run python docs/reference.py
    NO_MKDOCS_2_WARNING=1 uv run --group docs mkdocs build --strict

# record the golden runs again (a minute); explain the diff in CHANGELOG.md
golden:
    uv run python tests/golden.py
