"""Export a model with a learned spectrum to a plain Llama that stock transformers loads.

Needs Hugging Face: pip install 'grape-pe[hf]'
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from grape_pe.hf import GrapeConfig, GrapeForCausalLM, export


def main() -> None:
    torch.manual_seed(0)
    config = GrapeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        encoding="grape-m-basis",
        shared_encoding=True,  # stock RoPE has one spectrum for the whole model
        qk_norm=False,  # a norm between projection and rotation would prevent folding the basis into the projection
    )
    model = GrapeForCausalLM(config).eval()
    with torch.no_grad():  # as if trained: other frequencies, another basis
        model.model.encoding.frequencies.delta.normal_(0, 8)
        model.model.encoding.weight.normal_(0, 0.5)

    tokens = torch.randint(0, 256, (2, 64))
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        export(model, directory)
        written = json.loads(Path(directory, "config.json").read_text())
        stock = LlamaForCausalLM.from_pretrained(directory)
        print(f"written: {written['architectures'][0]}, rope_type {written['rope_parameters']['rope_type']}")
        print(f"logits differ by {(stock(tokens).logits - model(tokens).logits).abs().max():.1e}")

    try:
        export(GrapeForCausalLM(GrapeConfig(**{**config.to_dict(), "encoding": "rope+fox"})), "nowhere")
    except ValueError as reason:
        print(f"refused: {reason}")


if __name__ == "__main__":
    main()
