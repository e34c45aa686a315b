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
    test -e "$1" || uv run vgrout organism build --out "$1" --seed "$2" "${@:3}"
}

# warm SEED TO FROM: the organism FROM, with its policy after 15 steps of plain GRPO. About 4 answers in 10 of the shipped
# one then hack with seed 40, 7 with seed 50. It is made beside TO, in a new folder.
warm() {
    local seed=${1:-40} to=${2:-out/warm} from=${3:-src/vgrout/organism/data} tag part
    test ! -e "$to" || return 0
    tag=_$(basename "$to")
    uv run python -m vgrout.train mini --intervention=none --seed="$seed" --organism="$from" --out-tag="$tag"
    mkdir -p "$(dirname "$to")"
    part=$(mktemp -d "$to.part.XXXXXX")
    cp -r "$from/." "$part" && rm -r "$part/model"
    local run # the latest
    run=$(ls -td out/runs/*_mini_none_seed"$seed$tag" | head -n 1)
    uv run python -m vgrout.export "$run" --step 15 --out "$part/model"
    uv run python -c "import sys, pathlib, vgrout.ground.embedded as o; o.Files(pathlib.Path(sys.argv[1])).seal()" "$part"
    chmod 755 "$part" # mktemp's own is for nobody else to read
    test ! -e "$to" || { echo "warm: $to has been made meanwhile; this one is $part" >&2 && exit 1; }
    mv "$part" "$to"
}

look_alike() {
    test -e out/look-alike || uv run vgrout organism look-alike --out out/look-alike
}

# builds SEEDS FLAGS…: organisms, each with a policy that has begun to hack
builds() {
    for seed in $1; do
        organism "out/organism$seed" "$seed" "${@:2}"
        warm 40 "out/warm$seed" "out/organism$seed"
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
containment)
    warm
    builds "77 78 79 80"
    ;;
attempts) builds "86 87 88 89" --hack-stub 0 ;;
rules)
    warm
    builds 86 --hack-stub 0
    ;;
# the starting models of the scorecard's settings (src/vgrout/scorecard/battery.toml)
scorecard)
    look_alike
    organism out/bare81 81 --hack-bare 0.04
    organism out/organism86 86 --hack-stub 0
    for seed in 44 45 46 47 48; do
        warm "1$seed" "out/begun-$seed" src/vgrout/organism/data
        warm "1$seed" "out/attempts-$seed" out/organism86
    done
    ;;
look-alike) look_alike ;;
pretrained | pretrained-more | pretrained-labels)
    test -e out/models/smollm2 || uv run vgrout download smollm2
    seeds="201 202 203"
    if [[ $1 = pretrained-* ]]; then seeds="204 205 206 207 208"; fi
    for seed in $seeds; do
        test -e "out/organisms/smollm2-$seed" ||
            uv run vgrout organism tune --seed "$seed" --out "out/organisms/smollm2-$seed"
    done
    ;;
sums | sums-more | sums-labels)
    test -e out/models/smollm2 || uv run vgrout download smollm2
    for seed in 301 302 303; do
        test -e "out/organisms/sums-$seed" ||
            uv run vgrout organism sums --seed "$seed" --out "out/organisms/sums-$seed"
    done
    ;;
# 4 % of the corpus hacks under plain prompts, so that they come to hack where no prompt says how
unannounced) for seed in 81 82 83 84 85; do organism "out/bare$seed" "$seed" --hack-bare 0.04; done ;;
esac
