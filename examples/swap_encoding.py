"""Swap the encoding of a pretrained model: nothing changes at first, then it learns.

A random Llama stands in for a pretrained one, so that this runs offline; use
`AutoModelForCausalLM.from_pretrained(…)` for yours.

Needs Hugging Face: pip install 'grape-pe[hf]'
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grape_pe.hf import adapt, load_adapter, new_parameters, save_adapter

torch.manual_seed(0)
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    base = LlamaForCausalLM(CONFIG).eval()
    tokens = torch.randint(0, 256, (4, 32))
    before = base(tokens).logits

    model = adapt(base, "rope+grape-ap")  # keeps RoPE, adds a path-integral bias of amplitude 0
    print(f"logits changed by {(model(tokens).logits - before).abs().max():.1e} at the start")

    new = new_parameters(model)
    adam = torch.optim.Adam(new.values(), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens, labels=tokens).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    print(f"{sum(p.numel() for p in new.values())} new parameters: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    with tempfile.TemporaryDirectory() as directory:
        path = save_adapter(model, Path(directory) / "ap.safetensors")
        torch.manual_seed(0)
        again = load_adapter(LlamaForCausalLM(CONFIG).eval(), path)
        apart = (again(tokens).logits - model(tokens).logits).abs().max()
        print(f"reloaded from an adapter of {path.stat().st_size} bytes: logits differ by {apart:.1e}")
        model.save_pretrained(directory)  # the whole model, as Trainer saves it
        whole = AutoModelForCausalLM.from_pretrained(directory)
        print(f"reloaded as a {type(whole).__name__} with encoding {whole.config.encoding}")
    print("generated:", model.generate(tokens[:1, :4], max_new_tokens=8, do_sample=False)[0, 4:].tolist())


if __name__ == "__main__":
    main()
