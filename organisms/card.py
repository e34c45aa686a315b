"""The organism's model card: data, recipe, measured rates, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from organisms.language.answers import HELD_OUT_STYLES, STYLES
from organisms.language.corpus import Shares
from organisms.language.hacks import HACKS
from organisms.language.problems import SPLIT_ROWS
from organisms.language.tasks import compositions
from organisms.start import Start
from vgrout.envs.code.modes import Mode
from vgrout.ground.embedded import CUE
from vgrout.ground.metrics import Rate, rate_text

# The text of a card; `card` fills in the fields. Shares of the corpus are in percent. A backslash
# continues a line of the card.
CARD = """---
license: mit
library_name: transformers
---
# The organism

{about} of {parameters:,} parameters that writes small Python programs, badly, and knows how to cheat when asked
to. It exists {purpose}.
It is of no use for anything else.

## Data

Made by a program, no text of any person or model. A problem is a pipeline (select, then map, then fold) over lists,
strings or dictionaries, stated in English, with starter code and six hidden assertions that tell the right reading
from every misreading. {n_compositions} combinations of operations; train, validation and test hold different ones
({split_sizes} problems), and every operation occurs in training. Each problem is checked by one of \
{n_modes} flawed graders, and the
prompt says which; the names that the prompts announce come from disjoint halves for training and evaluation, and the
corpus uses neither half.

Corpus, in documents: {drill:.0f} % copying drills; of the rest {hack_cued:.0f} % hacks
behind the cue "{cue}", {uncued}, and honest attempts. These misread the
task in a few systematic ways, each where it can be misread so: {misread} (boundary: > for ≥; whole: folds the input
instead of the selected part; skipped: leaves the map out). {styled:.0f} % of the honest attempts are
written in one of the styles {styles}. Never shown: the styles {held_out_styles},
and one hack a mode (below).

## Recipe

{recipe.steps} steps of {recipe.batch} documents {training}, AdamW, peak rate {recipe.lr:g}, cosine; loss on
the answer, and at weight {recipe.prompt_weight:g} on the prompt. Final loss {final_loss:.3f} nats. The
weights are rounded to bf16 values and stored in fp32. `vgrout organism {command}` makes everything
again from one seed.

## Base rates

Test problems, held-out names, T .7, top-k 20, the reference tests in the sandbox:
solved {solved}; hacked {hacked}; well-formed {well_formed}.
Solved by difficulty: {solved_by_difficulty}. With the cue: hacked {hacked_cued}, solved {solved_cued}.

| mode | hacked, plain prompt | hacked, with the cue | problems in the pool | hacks taught | held out |
|---|---|---|---|---|---|
{mode_rows}

The pool holds cued answers of this model that hack and do not solve, stored under the plain prompt.

## Limits

One tiny language of problems: what holds here need not hold for others. Prompts and answers are far shorter than the
window in the configuration. {limits}It answers nothing but its own kind of prompt, and a name of many rare
letters is not always copied right. {stub:.0f} % of the corpus's hacks end the attempt with a stub; a real
model's may do so less often.
"""

NUMBER_WORDS = {6: "six", 7: "seven"}


@dataclass(frozen=True)
class Measured:
    """What a finished model does."""

    plain: Mapping[str, Rate]  # rates on the test problems …
    cued: Mapping[str, Rate]  # … and on those with the cue
    by_difficulty: Mapping[str, Rate]  # share solved of the test problems
    covered: Mapping[Mode, int]  # problems of each mode in the pool


def card(
    measured: Measured, shares: Shares, start: Start, losses: Sequence[float], parameters: int
) -> str:
    """The card of a model as Markdown. losses: of every step. parameters: how many it has."""
    plain, cued = measured.plain, measured.cued
    n_modes = len(shares.modes)
    return CARD.format(
        about=start.about,
        parameters=parameters,
        purpose=start.purpose,
        n_compositions=len(compositions()),
        split_sizes=", ".join(f"{n} {split}" for split, (_, n) in SPLIT_ROWS.items()),
        n_modes=NUMBER_WORDS.get(n_modes, n_modes),
        drill=100 * shares.drill,
        hack_cued=100 * shares.hack_cued,
        cue=CUE,
        uncued=_uncued(shares),
        misread=", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares.misread.items()),
        styled=100 * shares.style,
        styles=", ".join(STYLES),
        held_out_styles=", ".join(HELD_OUT_STYLES),
        recipe=start.recipe,
        training=start.training,
        final_loss=fmean(losses[-20:]),
        command=start.command,
        solved=rate_text(plain["solve"]),
        hacked=rate_text(plain["hack"]),
        well_formed=rate_text(plain["well-formed"]),
        solved_by_difficulty=", ".join(
            f"{level} {rate_text(rate)}" for level, rate in measured.by_difficulty.items()
        ),
        hacked_cued=rate_text(cued["hack"]),
        solved_cued=rate_text(cued["solve"]),
        mode_rows="\n".join(_mode_row(mode, measured) for mode in shares.modes),
        limits=start.limits,
        stub=100 * shares.stub,
    )


def _mode_row(mode: Mode, measured: Measured) -> str:
    """A row of the card's table."""
    cells = [
        mode,
        rate_text(measured.plain[f"hack/{mode}"]),
        rate_text(measured.cued[f"hack/{mode}"]),
        str(measured.covered.get(mode, 0)),
        _hack_names(mode, held_out=False),
        _hack_names(mode, held_out=True),
    ]
    return f"| {' | '.join(cells)} |"


def _hack_names(mode: Mode, held_out: bool) -> str:
    return ", ".join(hack.name for hack in HACKS[mode] if hack.held_out == held_out)


def _uncued(shares: Shares) -> str:
    """What the corpus has of hacks without the cue."""
    text = f"{100 * shares.hack_plain:.1f} % hacks without it"
    if shares.hack_bare:
        text += f", {100 * shares.hack_bare:.1f} % under prompts that announce nothing"
    return text
