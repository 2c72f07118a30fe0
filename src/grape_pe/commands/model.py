"""`grape model`."""

from __future__ import annotations

import argparse
import json

from .errors import OK, CommandError
from .parsers import Commands, add_command


def add_parsers(commands: Commands) -> None:
    help, example = (
        "count the parameters of one of the paper's models",
        "grape model medium --encoding grape-ap",
    )
    parser = add_command(commands, "model", run_model, help, example)
    parser.add_argument("size", choices=("medium", "large"), help="model size in the paper")
    parser.option("--encoding", "NAME", "any encoding, or several joined by +", "rope")
    parser.flag("--kv-shift")
    parser.flag("--real", "allocate the weights (default: meta device)")
    parser.flag("--json")


def run_model(options: argparse.Namespace) -> int:
    import torch

    from ..models import Decoder, DecoderConfig

    make = DecoderConfig.medium if options.size == "medium" else DecoderConfig.large
    try:
        config = make(encoding=options.encoding, kv_shift=options.kv_shift)
        encoding = config.build_encoding()
    except ValueError as problem:
        raise CommandError(str(problem)) from None
    with torch.device("cpu" if options.real else "meta"):
        model = Decoder(config)
    counts = {
        "parameters": model.parameter_count(),
        "encoding_parameters_per_layer": sum(p.numel() for p in encoding.parameters()),
    }
    if options.json:
        print(json.dumps(counts))
        return OK
    print(f"{counts['parameters']:>13,} parameters")
    print(f"{counts['encoding_parameters_per_layer']:>13,} of the encoding in each layer")
    return OK
