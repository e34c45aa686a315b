"""The organism's tokenizer: a byte-level BPE that has one way to write each name."""

import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from organisms.language.hacks import MODES
from organisms.language.tasks import LEAD, STARTER, STARTER_END, SYSTEM
from organisms.recipe import MERGED
from vgrout.envs.code.modes import MODE_SPECS, PLAIN_PHRASE, Mode
from vgrout.ground.data import Message

WINDOW = 1024  # tokens a position may have; the corpus stays below 256
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _fixed(modes: Sequence[Mode]) -> list[str]:
    """Texts that never vary, sorted; each becomes one token.

    As merges of the BPE they would fill the vocabulary with fragments that no name contains. A
    model that has never copied a token does not copy it.
    """
    texts = {SYSTEM, LEAD, STARTER, STARTER_END}
    texts.add(f" {PLAIN_PHRASE}")
    texts.add("```python\nclass Solution:\n    def ")
    for mode in modes:
        for part in MODE_SPECS[mode].template.split("{marker}"):
            if len(part) > 3:
                texts.add(f" {part}" if part.startswith("and ") else part)
    return sorted(texts)


# A name must have the same tokens in prompt and answer, whatever surrounds it, or the model could
# not copy it. So a word takes the space that follows it, not the one before, and only where prose
# goes on.
_PIECES = (
    r"```python\n",
    r"\n```",
    r"\n *(?:return |for |if |def |class |import |kept = \[|out = )?",
    r"\(self, ",
    r"\):\n +(?:return |kept = \[)?",
    r"[A-Za-z]+(?: (?=[A-Za-z]))?",
    r" ?[0-9]",
    r"_",
    r" ?[^\sA-Za-z0-9_]+(?: (?=[A-Za-z]))?",
    r" ",
)


def train_tokenizer(
    texts: Iterable[str], merged: int = MERGED, modes: Sequence[Mode] = MODES
) -> PreTrainedTokenizerFast:
    """Train a tokenizer, which depends on the texts alone.

    merged: tokens of the BPE. modes: those whose hints are fixed text.
    """
    fixed = _fixed(modes)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merged,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Fixed texts are added and cut out before the training, so that they leave no merges behind.
    core.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    boundary = re.compile("|".join(map(re.escape, fixed)))
    parts = (part for text in texts for part in boundary.split(text))
    core.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def render(messages: Sequence[Message]) -> str:
    """The text of the chat template with the generation prompt, without a tokenizer."""
    turns = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return f"{turns}{START}assistant\n"


def name_pieces(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Every token that a name could contain, as text, sorted."""
    texts = [str(tokenizer.decode([i])) for i in range(len(tokenizer))]
    return sorted(text for text in texts if re.fullmatch("[a-z]{2,}", text))
