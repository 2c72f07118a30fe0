"""`grape sample`."""

from __future__ import annotations

import argparse
import json

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command, add_json


def add_parsers(commands: Commands) -> None:
    parser = add_command(
        commands, "sample", run_sample, "write text with a trained model",
        'grape sample runs/x --prompt "The import system" --tokens 100',
    )  # fmt: skip
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a run, one of its checkpoints, or a model directory"
    )
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="beginning of the text (default: a new document)"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="most tokens to generate (default: 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add_json(parser)


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
