"""`grape sample`."""

from __future__ import annotations

import argparse
import json

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command, natural, positive, real


def add_parsers(commands: Commands) -> None:
    example = 'grape sample runs/x --prompt "The import system" --tokens 100'
    parser = add_command(commands, "sample", run_sample, "write text with a trained model", example)
    add = parser.option
    add("checkpoint", "CHECKPOINT", "a run, one of its checkpoints, or a model directory")
    add("--prompt", "TEXT", "beginning of the text (default: a new document)", "")
    add("--tokens", "N", "most tokens to generate", 200, positive)
    add("--temperature", "T", "divides the logits; 0 is greedy", 0.8, real)
    add("--top-p", "P", "nucleus sampling", 0.95, real)
    add("--seed", "N", "random seed", 0, natural)
    parser.flag("--json")


def run_sample(options: argparse.Namespace) -> int:
    require("tokenizers", "lab")
    from ..lab.data import load_tokenizer
    from ..lab.evaluate.sampling import sample_tokens
    from ..lab.train.distributed import default_device
    from ..lab.train.saved_model import load_model, tokenizer_directory

    words = load_tokenizer(tokenizer_directory(options.checkpoint))
    model = load_model(options.checkpoint).to(default_device())
    prompt = [words.eos, *words.encode(options.prompt)]
    tokens: list[int] = []
    shown = ""
    coming = sample_tokens(
        model, prompt, count=options.tokens, temperature=options.temperature,
        top_p=options.top_p, seed=options.seed, stop=words.eos,
    )  # fmt: skip
    if not options.json:
        print(options.prompt, end="", flush=True)
    for token in coming:
        tokens.append(token)
        text = words.decode(tokens)
        if not options.json and not text.endswith("�"):  # a character may take several tokens
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(json.dumps({"prompt": options.prompt, "text": words.decode(tokens)}) if options.json else "")
    return OK
