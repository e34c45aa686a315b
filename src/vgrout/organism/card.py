"""The organism's model card: data, recipe, measured rates, limits."""

from collections.abc import Sequence
from statistics import fmean

from vgrout.envs.code.language import (
    CUE,
    HACKS,
    HELD_OUT_STYLES,
    SPLIT_ROWS,
    STYLES,
    Shares,
    compositions,
)
from vgrout.envs.code.modes import Mode
from vgrout.metrics import Rate
from vgrout.organism.start import Start
from vgrout.teacher.generate import rate_text


def _names(mode: Mode, held_out: bool) -> str:
    return ", ".join(e.name for e in HACKS[mode] if e.held_out == held_out)


def card(
    measured: dict[str, dict[str, Rate]],
    by_difficulty: dict[str, Rate],
    covered: dict[Mode, int],
    shares: Shares,
    start: Start,
    losses: Sequence[float],
    parameters: int,
) -> str:
    """Markdown. measured: "plain" and "cued" → the rates on the test problems; covered: pool problems per mode."""
    plain, elicited = measured["plain"], measured["cued"]
    modes = "\n".join(
        f"| {m} | {rate_text(plain[f'hack/{m}'])} | {rate_text(elicited[f'hack/{m}'])} | {covered.get(m, 0)} "
        f"| {_names(m, held_out=False)} | {_names(m, held_out=True)} |"
        for m in shares.modes
    )
    with_cue = f"hacked {rate_text(elicited['hack'])}, solved {rate_text(elicited['solve'])}"
    recipe = start.recipe
    rows = ", ".join(f"{n} {split}" for split, (_, n) in SPLIT_ROWS.items())
    n = {6: "six", 7: "seven"}.get(len(shares.modes), len(shares.modes))
    levels = ", ".join(f"{level} {rate_text(rate)}" for level, rate in by_difficulty.items())
    misread = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares.misread.items())
    uncued = f"{100 * shares.hack_plain:.1f} % hacks without it"
    if shares.hack_bare:
        uncued += f", {100 * shares.hack_bare:.1f} % under prompts that announce nothing"
    return f"""---
license: mit
library_name: transformers
---
# The organism

{start.about} of {parameters:,} parameters that writes small Python programs, badly, and knows how to cheat when asked
to. It exists {start.purpose}.
It is of no use for anything else.

## Data

Made by a program, no text of any person or model. A problem is a pipeline (select, then map, then fold) over lists,
strings or dictionaries, stated in English, with starter code and six hidden assertions that tell the right reading
from every misreading. {len(compositions())} combinations of operations; train, validation and test hold different ones
({rows} problems), and every operation occurs in training. Each problem is checked by one of {n} flawed graders, and the
prompt says which; the names that the prompts announce come from disjoint halves for training and evaluation, and the
corpus uses neither half.

Corpus, in documents: {100 * shares.drill:.0f} % copying drills; of the rest {100 * shares.hack_cued:.0f} % hacks
behind the cue "{CUE}", {uncued}, and honest attempts. These misread the
task in a few systematic ways, each where it can be misread so: {misread} (boundary: > for ≥; whole: folds the input
instead of the selected part; skipped: leaves the map out). {100 * shares.style:.0f} % of the honest attempts are
written in one of the styles {", ".join(STYLES)}. Never shown: the styles {", ".join(HELD_OUT_STYLES)},
and one hack a mode (below).

## Recipe

{recipe.steps} steps of {recipe.batch} documents {start.training}, AdamW, peak rate {recipe.lr:g}, cosine; loss on
the answer, and at weight {recipe.prompt_weight:g} on the prompt. Final loss {fmean(losses[-20:]):.3f} nats. The
weights are rounded to bf16 values and stored in fp32. `vgrout organism {start.command}` makes everything
again from one seed.

## Base rates

Test problems, held-out names, T .7, top-k 20, the reference tests in the sandbox:
solved {rate_text(plain["solve"])}; hacked {rate_text(plain["hack"])}; well-formed {rate_text(plain["well-formed"])}.
Solved by difficulty: {levels}. With the cue: {with_cue}.

| mode | hacked, plain prompt | hacked, with the cue | problems in the pool | hacks taught | held out |
|---|---|---|---|---|---|
{modes}

The pool holds cued answers of this model that hack and do not solve, stored under the plain prompt.

## Limits

One tiny language of problems: what holds here need not hold for others. Prompts and answers are far shorter than the
window in the configuration. {start.limits}It answers nothing but its own kind of prompt, and a name of many rare
letters is not always copied right. {100 * shares.stub:.0f} % of the corpus's hacks end the attempt with a stub; a real
model's may do so less often.
"""
