"""The examples about models run offline and show what they say."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def shown(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_swap_encoding(capsys):
    out = shown("swap_encoding", capsys)
    changed, differ = (float(x) for x in re.findall(r"(?:changed by|differ by) (\S+)", out))
    first, last = (float(x) for x in re.search(r"loss (\S+) -> (\S+)", out).groups())
    assert changed < 1e-5 and differ < 1e-5 and last < first


def test_export_and_reload(capsys):
    out = shown("export_and_reload", capsys)
    assert "LlamaForCausalLM, rope_type longrope" in out and "refused" in out
    assert float(re.search(r"differ by (\S+)", out).group(1)) < 1e-4


def test_train_with_hf(capsys):
    out = shown("train_with_hf", capsys)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", out)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "generated: b'The " in out


def test_nano_gpt(capsys):
    out = shown("nano_gpt", capsys)
    first, last = (float(x) for x in re.search(r"loss (\S+) -> (\S+)", out).groups())
    assert last < 0.7 * first and "generated: b'def " in out


def test_serve_lets_transformers_find_our_classes(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cli.serving.model_manager import ModelManager

    from grape_pe.hf import adapt

    tiny = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    adapt(LlamaForCausalLM(tiny), "rope+fox").save_pretrained(tmp_path)
    runpy.run_path(str(EXAMPLES / "serve.py"))
    loaded = ModelManager(device="cpu")._load_model(f"{tmp_path}@main")
    assert type(loaded).__name__ == "GrapeLlamaForCausalLM"
