#!/usr/bin/env bash
# What a study's runs start from: organisms, and policies that hack already. `just study NAME` calls it; what is
# there already is left, and a study that starts from the shipped organism needs nothing.
#
#     studies/prepare.sh NAME                  everything that studies/NAME.toml starts from
#     studies/prepare.sh warm [SEED TO FROM]   one policy: the organism FROM after 15 steps of plain GRPO
#
# A build takes ten minutes on two cores, a policy two.
set -euo pipefail
cd "$(dirname "$0")/.."

# organism TO SEED FLAGS…: a build of its own from a seed
organism() {
    test -e "$1" || uv run python -m vgrout.organism build --out "$1" --seed "$2" "${@:3}"
}

# started TO FROM SEED STEP FLAGS…: the organism FROM with the policy of step STEP of a run of plain GRPO
started() {
    test ! -e "$1" || return 0
    local tag
    tag=_$(basename "$1")
    uv run python -m vgrout.train mini --intervention=none --seed="$3" --organism="$2" --out-tag="$tag" "${@:5}"
    rm -rf "$1.part" && mkdir -p "$(dirname "$1")" && cp -r "$2" "$1.part" && rm -r "$1.part/model"
    local runs=(out/runs/*_mini_none_seed"$3$tag")
    uv run python -m vgrout.export "${runs[@]: -1}" --step "$4" --out "$1.part/model"
    uv run python -c "import sys, pathlib, vgrout.data.organism as o; o.Files(pathlib.Path(sys.argv[1])).seal()" "$1.part"
    mv "$1.part" "$1"
}

shipped=src/vgrout/organism/data

# About 4 answers in 10 of the shipped one hack with seed 40, 7 with seed 50.
warm() { started "${2:-out/warm}" "${3:-$shipped}" "${1:-40}" 15; }

# builds SEEDS FLAGS…: organisms, each with a policy that has begun to hack
builds() {
    for seed in $1; do
        organism "out/organism$seed" "$seed" "${@:2}"
        warm 40 "out/warm$seed" "out/organism$seed"
    done
}

# a share of $1 of their corpus hacks under plain prompts, so that they come to hack where no prompt says how
bare() {
    for seed in $2; do organism "out/bare$seed" "$seed" --hack-bare "$1"; done
}

# tuned SEEDS FLAGS…: SmolLM2 tuned on the corpus of a seed
tuned() {
    for seed in $1; do
        local to=out/organisms/smollm2-$seed
        test ! -e "$to" || continue
        test -e out/models/smollm2 || uv run python -m vgrout.download smollm2
        uv run python -m vgrout.organism tune --out "$to" --seed "$seed" "${@:2}"
    done
}

case "${1:-}" in
warm)
    # asked for by its seed: not to be taken for another one that is there
    if [ $# -gt 1 ] && [ -e "${3:-out/warm}" ]; then
        echo "warm: ${3:-out/warm} is there already; move it away to make it again" >&2
        exit 1
    fi
    warm "${@:2}"
    ;;
starts) warm 50 out/warm50 ;;
evading)
    warm
    warm 50 out/warm50
    ;;
axes-organism) organism out/organism77 77 ;;
adversaries | cold | containment | containment-* | hiding)
    warm
    builds "77 78 79 80"
    ;;
attempts) builds 86 --hack-stub 0 ;;
attempts-builds) builds "87 88 89" --hack-stub 0 ;;
recall) tuned "101 102 103 104 105" --modes run_tests,eq_override,exit_code,stdout_marker,sentinel,shown_test ;;
rules | shadow)
    warm
    builds 86 --hack-stub 0
    ;;
shown-test)
    builds "90 91" --modes run_tests,eq_override,exit_code,stdout_marker,sentinel,file_marker,shown_test
    ;;
unannounced | unannounced-probe-builds) bare 0.04 "81 82 83 84 85" ;;
unannounced-pilot)
    organism out/organism81 81 --hack-bare 0.01
    started out/quiet81 out/organism81 41 35 --steps=180 --unannounced-modes=eq_override,exit_code --mix-ratio=0
    ;;
sizes | unannounced-probe) # 0.25, 0.9 and 3.4 million weights
    organism out/bare81-64 81 --hidden 64 --hack-bare 0.04
    bare 0.04 81
    organism out/bare81-256 81 --hidden 256 --hack-bare 0.04
    ;;
esac
