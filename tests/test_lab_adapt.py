"""`grape adapt` on a tiny random Llama: what it trains, writes, continues and refuses."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import grape_pe.lab.pretrained as loading
from grape_pe.cli import main
from grape_pe.hf import adapt, new_parameters
from grape_pe.lab.adapt.decoder import PretrainedDecoder, check_unchanged
from grape_pe.lab.adapt.trainer import AdaptTrainer
from grape_pe.lab.data.tokenizer import build_tokenizer
from grape_pe.lab.errors import LabError
from grape_pe.lab.evaluate.lengths import stream_losses
from grape_pe.testing import TOL
from lab_runs import TEXT
from test_adapt_families import CASES, stir, stock

SIZES = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
BUDGET = ["--context", "32", "--steps", "6", "--batch", "2", "--checkpoint-every", "2", "--eval-every", "3",
          "--lengths", "1,2,4", "--eval-tokens", "64", "--quiet"]  # fmt: skip


def llama(**changes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A directory with model/ (and its tokenizer) and text/."""
    root = tmp_path_factory.mktemp("material")
    llama().save_pretrained(root / "model")
    build_tokenizer("bytes", []).save(root)
    for file in (root / "tokenizer").iterdir():
        file.rename(root / "model" / file.name)
    (root / "text").mkdir()
    for number in range(30):
        (root / "text" / f"{number:02d}.txt").write_text(TEXT.format(number) * 3)
    return root


def run(material, out, *more, encoding="rope+grape-ap", budget=BUDGET):
    named = () if encoding is None else ("--encoding", encoding)
    given = ["adapt", material / "model", *named, "--data", material / "text", "--out", out, *budget, *more]
    return main([str(each) for each in given])


@pytest.fixture(scope="module")
def finished(material, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run(material, out) == 0
    return out


def weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_the_result_loads_and_only_new_parameters_were_trained(material, finished):
    before, after = weights(material / "model"), weights(finished / "final")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    amplitudes = [t for name, t in after.items() if name.endswith("amplitude")]
    assert len(amplitudes) == 2 and all(bool((t != 0).any()) for t in amplitudes)
    assert (finished / "final" / "tokenizer.json").is_file()


def test_losses_are_measured_before_during_and_after(finished):
    steps = {
        int(p.stem.removeprefix("step-")): json.loads(p.read_text())
        for p in (finished / "evaluations").iterdir()
    }
    assert sorted(steps) == [0, 3, 6]
    for step, found in steps.items():
        lengths = {e["length"] for e in found["extrapolation"] if e["window"] is None}
        assert lengths == {16, 32, 64} and all(e["loss"] > 0 for e in found["extrapolation"])
        assert any(e["window"] == 16 for e in found["extrapolation"]) == (step in (0, 6))
    result = json.loads((finished / "result.json").read_text())
    assert result["changed_at_step_0"] < 1e-4 and result["trained"] > 0


def test_the_report_shows_before_and_after_positions_and_heads(finished):
    page = (finished / "report.html").read_text()
    text = re.sub(r"<[^>]+>", " ", page[page.index("<main>") : page.index("</main>")])
    for said in ("before", "rope+grape-ap", "Loss by position", "amplitude of the bias", "loss at 64"):
        assert said in text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL).group(1))
    rows = figures["heads-rope+grape-ap-0"]["views"][0]["data"][0]["z"]
    assert len(rows) == 2 and all(len(row) == 4 for row in rows)


@pytest.mark.parametrize("more", [("--train", "all"), ("--lora", "2")])
def test_a_killed_run_goes_on_to_the_same_weights(material, tmp_path, monkeypatch, more):
    assert run(material, tmp_path / "whole", *more) == 0
    log = AdaptTrainer._log

    def killed(self, done, *rest):
        if done == 5:
            self.checkpoints.finish()
            raise KeyboardInterrupt
        log(self, done, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(AdaptTrainer, "_log", killed)
        assert run(material, tmp_path / "cut", *more) == 130
    assert not (tmp_path / "cut" / "final").exists()
    assert run(material, tmp_path / "cut", *more) == 0
    for name in ("final/model.safetensors", "picture.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    ends = [
        json.loads((tmp_path / n / "evaluations/step-00000006.json").read_text()) for n in ("whole", "cut")
    ]
    assert ends[0]["extrapolation"] == ends[1]["extrapolation"] and ends[0]["val_loss"] == ends[1]["val_loss"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_weights(material, tmp_path):
    """With SIGKILL, in a process of its own, as often as it takes to end."""
    more = [*BUDGET[:2], "--steps", "40", "--batch", "2", "--checkpoint-every", "2", "--eval-every", "20",
            "--lengths", "1,2", "--eval-tokens", "64", "--quiet"]  # fmt: skip
    assert run(material, tmp_path / "whole", budget=more) == 0
    out, kills = tmp_path / "cut", 0
    given = [
        "adapt",
        material / "model",
        "--encoding",
        "rope+grape-ap",
        "--data",
        material / "text",
        "--out",
        out,
    ]
    while not (out / "result.json").exists():
        done = len(list(out.glob("checkpoints/step-*"))) and int(max(out.glob("checkpoints/step-*")).name[5:])
        process = subprocess.Popen([sys.executable, "-m", "grape_pe.cli", *map(str, given), *more])
        while process.poll() is None and kills < 3:
            at = [int(path.name[5:]) for path in out.glob("checkpoints/step-*")]
            if at and max(at) >= done + 6:
                process.kill()
                kills += 1
            time.sleep(0.02)
        assert process.wait() in (0, -9)
    assert kills >= 1
    for name in ("final/model.safetensors", "picture.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (out / name).read_bytes()


def test_lora_is_merged_and_trains_the_encoding_too(material, tmp_path):
    assert run(material, tmp_path / "out", "--lora", "2", encoding="rope+fox") == 0
    before, after = weights(material / "model"), weights(tmp_path / "out" / "final")
    changed = {name for name, t in before.items() if not torch.equal(t, after[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    assert not any("lora" in name for name in after)
    assert any(bool((t != 0).any()) for name, t in after.items() if name.endswith("amplitude"))


def test_checkpoints_hold_the_trained_parameters_only(finished):
    from safetensors import safe_open

    place = next((finished / "checkpoints").glob("step-*/*.safetensors"))
    with safe_open(place, "pt") as file:
        names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118
    assert names and all("encoding" in name for name in names)


def test_a_sweep_compares_encodings_and_takes_more_later(material, tmp_path, monkeypatch, capsys):
    out = tmp_path / "sweep"
    measured = []
    before = AdaptTrainer._measure_lengths
    monkeypatch.setattr(
        AdaptTrainer, "_measure_lengths", lambda self, done: (measured.append(done), before(self, done))
    )
    assert run(material, out, "--sweep", "rope,rope+alibi", "--train", "all", encoding=None) == 0
    assert measured == [0, 3, 6, 3, 6]  # what is the same before training is measured once
    done = (out / "rope" / "result.json").stat().st_mtime_ns
    assert run(material, out, "--sweep", "rope,rope+alibi,rope+fox", "--train", "all", encoding=None) == 0
    assert (out / "rope" / "result.json").stat().st_mtime_ns == done
    text = (out / "report.html").read_text()
    assert all(f'data-arm="{name}"' in text for name in ("before", "rope", "rope+alibi", "rope+fox"))
    # the same text and the same start: evaluations at step 0 agree for all of them
    losses = {
        name: json.loads((out / name / "evaluations/step-00000000.json").read_text())["val_loss"]
        for name in ("rope", "rope+alibi", "rope+fox")
    }
    assert max(losses.values()) - min(losses.values()) < TOL[torch.float32]
    capsys.readouterr()
    assert main(["report", str(out / "results.jsonl"), "--markdown"]) == 0
    table = capsys.readouterr().out
    for arm in ("before", "rope", "rope+alibi", "rope+fox"):
        found = json.loads((out / ("rope" if arm == "before" else arm) / "evaluations" /
                            f"step-0000000{0 if arm == 'before' else 6}.json").read_text())  # fmt: skip
        loss = next(e["loss"] for e in found["extrapolation"] if (e["length"], e["window"]) == (64, None))
        assert re.search(rf"\| `{re.escape(arm)}` \|.*\b{loss:.3f}\b", table)


def test_other_frequencies_are_measured_before_training_too(material, tmp_path):
    """An arm whose logits change at once does not take the losses before training from another."""
    out, more = tmp_path / "out", ("--train", "all", "--passkey", "1", "--eval-tokens", "256")
    budget = [*BUDGET[:2], "--steps", "1", "--lengths", "16", "--quiet"]
    arms = "rope[scaling=linear:4],rope,rope+fox"
    assert run(material, out, "--sweep", arms, *more, encoding=None, budget=budget) == 0
    losses = {
        arm: json.loads((out / arm / "evaluations/step-00000000.json").read_text())["val_loss"]
        for arm in ("rope[scaling=linear:4]", "rope", "rope+fox")
    }
    assert losses["rope"] == losses["rope+fox"] != losses["rope[scaling=linear:4]"]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()[1:]]
    before = {line["label"]: line for line in lines}["before"]
    assert before["val_loss"] == losses["rope"]
    assert [len(line["passkey"]) for line in lines] == [5, 5, 5, 5]
    assert "256 tokens" in (out / "report.html").read_text()


YARN = "rope[scaling={type: yarn, factor: 4}]"


def test_rescaled_frequencies_change_the_logits_at_once_and_are_kept(material, tmp_path):
    assert run(material, tmp_path / "out", "--train", "all", encoding=YARN) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["changed_at_step_0"] > 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert model.config.encoding_options["scaling"] == {"type": "yarn", "factor": 4, "original_context": 16}


def test_biases_alone_are_reached_by_fading_the_rotation(material, tmp_path, monkeypatch):
    strengths = []
    update = AdaptTrainer._update

    def watched(self, step, *rest):
        strengths.append(self.adapted.pretrained.config.rotation)
        return update(self, step, *rest)

    def killed(self, done, *rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(AdaptTrainer, "_update", watched)
    more = ("--train", "all")
    assert run(material, tmp_path / "whole", *more, encoding="fox") == 0
    assert strengths == pytest.approx([1, 2 / 3, 1 / 3, 0, 0, 0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final")
    assert (model.config.encoding, model.config.rotation) == ("fox", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(AdaptTrainer, "_measure_lengths", lambda self, done: done == 3 and killed(self, done))
        assert run(material, tmp_path / "cut", *more, encoding="fox") == 130
    assert run(material, tmp_path / "cut", *more, encoding="fox") == 0
    ends = [(tmp_path / n / "final/model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert ends[0] == ends[1]


def test_export_writes_a_stock_model_with_the_same_logits(material, tmp_path):
    assert run(material, tmp_path / "out", "--export", encoding="grape-m") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "stock")
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, stock(tokens).logits, rtol=1e-4, atol=1e-4)


BAD = {
    "other rotation": (("--encoding", "grape-m-ctx"), "would change the logits"),
    "nothing stock left": (("--encoding", "fox", "--export"), "stock models rotate"),
    "fading what is frozen": (("--encoding", "fox"), "--train all or --lora"),
    "scaling": (("--encoding", "rope[scaling={type: yarn}]", "--train", "all"), "needs 'factor'"),
    "unknown encoding": (("--encoding", "rope+kerpel"), "kerpel"),
    "nothing to train": (("--encoding", "rope"), "adds no parameter to train"),
    "kv-shift": (("--encoding", "rope+fox+kv"), "without KV-shift"),
    "no stock form": (("--encoding", "rope+fox", "--export"), "--export"),
    "two ways": (("--encoding", "rope+fox", "--lora", "2", "--train", "all"), "--lora"),
    "both": (("--encoding", "rope+fox", "--sweep", "rope+fox"), "either --encoding"),
    "twice": (("--sweep", "rope+fox,rope+fox"), "each once"),
    "lengths": (("--encoding", "rope+fox", "--lengths", "0,1"), "--lengths"),
    "steps": (("--encoding", "rope+fox", "--steps", "0"), "steps"),
    "eval tokens": (("--encoding", "rope+fox", "--eval-tokens", "8"), "--eval-tokens"),
    "passkey": (("--encoding", "rope+fox", "--passkey", "1"), "passkey texts need at least"),
    "rank": (("--encoding", "rope+fox", "--lora", "-1"), "--lora must be a whole number of at least 0"),
    "option": (("--encoding", "rope+fox[spectrum=1]"), "spectrum"),
}


@pytest.mark.parametrize("more, said", BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_anything_is_written(material, tmp_path, capsys, more, said):
    assert run(material, tmp_path / "out", *more, encoding=None) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("model, data, said", [
    ("nothing", "text", "no model in"), ("model", "nothing", "no source"), ("text", "text", "no model in"),
])  # fmt: skip
def test_missing_files_are_refused(material, tmp_path, capsys, model, data, said):
    given = [material / model, "--encoding", "rope+fox", "--data", material / data, "--out", tmp_path / "out"]
    assert main(["adapt", *map(str, given)]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_directory_is_not_continued_with_other_settings(material, finished, capsys):
    assert run(material, finished, "--lr", "1e-4") == 2
    assert "train.lr" in capsys.readouterr().err
    assert run(material, finished.parent, encoding="rope+fox") == 2
    assert "and is not a run; give an empty or new directory" in capsys.readouterr().err


def test_gguf_without_its_package_says_what_to_install(material, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    real = loading.require

    def missing(module, extra):
        if module == "gguf":
            raise ImportError(f"this needs gguf; install it with: pip install 'grape-pe[{extra}]'")
        return real(module, extra)

    monkeypatch.setattr(loading, "require", missing)
    given = [
        tmp_path / "model.gguf",
        "--encoding",
        "rope+fox",
        "--data",
        material / "text",
        "--out",
        tmp_path / "out",
    ]
    assert main(["adapt", *map(str, given)]) == 2
    assert "grape-pe[adapt]" in capsys.readouterr().err


def stirred(name, **changes):
    model = adapt(llama(**changes), name)
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.3)
    return PretrainedDecoder(model)


def test_streamed_losses_are_those_of_the_whole_sequence():
    model, tokens = stirred("rope+grape-ap"), torch.randint(256, (2, 41))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        whole = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        mean = float(model(tokens[:, :-1], targets=tokens[:, 1:]))
    found = stream_losses(model, tokens, chunk=7)
    torch.testing.assert_close(found.flatten(), whole, rtol=1e-4, atol=1e-4)
    assert mean == pytest.approx(float(whole.mean()), rel=1e-4)


def test_a_window_hides_what_is_further_back():
    """In one layer, a token with a window sees what it would see if the text began a window before it."""
    model, tokens = stirred("rope+alibi", num_hidden_layers=1), torch.randint(256, (1, 40))
    found = stream_losses(model, tokens, chunk=16, window=8)
    cut = stream_losses(model, tokens[:, 20:29])
    torch.testing.assert_close(found[:, 27], cut[:, 7], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, stream_losses(model, tokens), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_every_family_is_streamed_as_it_computes(case):
    """Losses through the cache, as they are measured, are those of one pass; sliding layers keep their windows."""
    uncapped = {"final_logit_softcapping": None} if case == "Gemma2" else {}
    model = PretrainedDecoder(stir(adapt(stock(case, **uncapped), "rope+fox")))
    tokens = torch.randint(60, (2, 25))
    logits = model(tokens[:, :-1])
    torch.testing.assert_close(logits, model.pretrained(tokens[:, :-1]).logits, rtol=1e-4, atol=1e-4)
    found = stream_losses(model, tokens, chunk=7)
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found.flatten(), whole, rtol=1e-4, atol=1e-4)
    assert len(model.observe(tokens[0])) == 3


@pytest.mark.parametrize("case", ["GPTNeoX", "Phi3", "Gemma3", "SmolLM3"])
def test_other_families_are_trained_and_loaded(case, material, tmp_path):
    model = stock(case, vocab_size=257, max_position_embeddings=16, eos_token_id=256, hidden_size=32)
    model.save_pretrained(tmp_path / "model")
    for file in (material / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    (tmp_path / "text").symlink_to(material / "text")
    budget = ["--context", "32", "--steps", "2", "--batch", "1", "--lengths", "1,2", "--eval-tokens", "64"]
    assert run(tmp_path, tmp_path / "out", "--lora", "2", "--quiet", budget=budget) == 0
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final"), torch.arange(12)[None]
    assert type(again).__name__ == f"Grape{case}ForCausalLM"
    with torch.no_grad():
        assert (again(ids).logits - model(ids).logits).abs().max() > 0


def test_a_head_that_is_more_than_a_matrix_is_refused():
    model, tokens = stirred("rope+fox"), torch.arange(9)[None]
    with torch.no_grad():
        capped = 2 * torch.tanh(model(tokens) / 2)
    with pytest.raises(LabError, match="soft-capping"):
        check_unchanged(capped, model, tokens)
