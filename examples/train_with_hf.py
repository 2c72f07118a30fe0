"""Train a small GRAPE model with Hugging Face's Trainer, on text that every Python carries.

Needs Hugging Face: pip install 'grape-pe[hf]'
"""

import pydoc_data.topics
import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from grape_pe.hf import GrapeConfig, GrapeForCausalLM

LENGTH, STEPS = 128, 30


def sequences() -> list[dict[str, torch.Tensor]]:
    """Bytes of the language reference, in pieces; a byte is a token."""
    text = "".join(pydoc_data.topics.topics.values()).encode()[: 400 * LENGTH]
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    torch.manual_seed(0)
    config = GrapeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        encoding="grape-m+grape-ap",
        kv_shift=True,
    )
    model = GrapeForCausalLM(config)
    print(f"{config.encoding}: {model.num_parameters():,} parameters")
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            logging_steps=STEPS // 3,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=sequences()).train()
        model.save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.tensor([list(b"The ")])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    print("generated:", bytes(out[0].tolist()))


if __name__ == "__main__":
    main()
