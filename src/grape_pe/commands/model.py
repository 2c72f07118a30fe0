"""`grape model`."""

from __future__ import annotations

import argparse
import json

from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json


def add_parsers(commands: Commands) -> None:
    parser = add_command(
        commands, "model", run_model, "count the parameters of one of the paper's models",
        "grape model medium --encoding grape-ap",
    )  # fmt: skip
    parser.add_argument("size", choices=("medium", "large"), help="model size in the paper")
    parser.add_argument("--encoding", default="rope", help="any name, or several joined by + (default: rope)")
    parser.add_argument(
        "--kv-shift", action="store_true", help="mix each key and value with the previous one"
    )
    parser.add_argument("--real", action="store_true", help="allocate the weights (default: meta device)")
    add_json(parser)


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
