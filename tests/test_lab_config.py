"""The configuration of a run: typed, refusing what it does not know, the same again after YAML."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")

import grape_pe as grape
from grape_pe.cli import main
from grape_pe.lab.config import (
    FREE_ON_RESUME,
    RunConfig,
    TrainSection,
    differences,
    field_names,
    flat,
    load,
    recipe_names,
    validated,
)
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.optimization import adamw, initialise, learning_rate
from grape_pe.models import Decoder

ENCODINGS = grape.names()
rates = st.floats(1e-8, 10, allow_nan=False)
texts = st.text("aZ09 .:#-{}[]'\"~éß字🍇\n\t", min_size=1, max_size=12)
plain = st.one_of(st.booleans(), st.integers(-9, 9), st.floats(-1e9, 1e9), texts)


@st.composite
def trees(draw: st.DrawFn) -> dict:
    """Settings such as a user may write them."""
    warmup = draw(st.integers(0, 50))
    low, high = sorted([draw(rates), draw(rates)])
    micro = draw(st.integers(1, 8))
    return {
        "name": draw(texts),
        "seed": draw(st.integers(0, 2**62)),
        "model": {
            "encoding": draw(st.sampled_from(ENCODINGS)),
            "encoding_options": draw(st.dictionaries(texts, plain, max_size=2)),
            "kv_shift": draw(st.booleans()),
            "width": draw(st.integers(1, 9999)),
        },
        "data": {"source": draw(texts), "documents": draw(st.booleans())},
        "train": {
            "steps": warmup + draw(st.integers(1, 10**9)), "warmup": warmup, "lr": high, "min_lr": low,
            "batch": micro * draw(st.integers(1, 9)), "micro_batch": micro,
            "schedule": draw(st.sampled_from(["cosine", "wsd"])), "decay": draw(st.floats(0, 1)),
            "precision": draw(st.sampled_from(["fp32", "bf16"])),
        },
        "log": {"wandb": draw(st.text(max_size=3))},
    }  # fmt: skip


@settings(max_examples=50)
@given(trees())
def test_yaml_gives_the_same_configuration_back(tree: dict) -> None:
    config = validated(tree)
    again = validated(yaml.safe_load(config.to_yaml()))
    assert again == config and not differences(config, again)


@settings(max_examples=30)
@given(trees())
def test_dotted_overrides_are_the_tree(tree: dict) -> None:
    dotted = {f"{section}.{name}": value for section, inner in tree.items() if isinstance(inner, dict)
              for name, value in inner.items()}  # fmt: skip
    dotted |= {name: value for name, value in tree.items() if not isinstance(value, dict)}
    if not any(isinstance(value, str) and value.strip().startswith("{") for value in dotted.values()):
        assert load({}, dotted) == validated(tree)  # a string that begins so is read as YAML


@pytest.mark.parametrize("recipe", recipe_names())
def test_print_config_loads_back(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--encoding", "rope+fox", "--kv-shift", "--train.lr", "2e-3", "--seed", "7"]
    assert main(["train", recipe, *changes, "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    config = load(tmp_path / "printed.yaml")
    assert config == load(
        recipe, {"model.encoding": "rope+fox", "model.kv_shift": True, "train.lr": 2e-3, "seed": 7}
    )
    assert main(["train", recipe, *changes, "--print-config", "--json"]) == 0
    assert validated(json.loads(capsys.readouterr().out)) == config


def test_a_file_over_its_base(tmp_path: Path) -> None:
    """A base is a recipe, or a file beside the one that names it; sections merge, values are replaced."""
    (tmp_path / "lower.yaml").write_text("base: small\nmodel: {layers: 2, encoding_options: {a: 1, b: 2}}\n")
    (tmp_path / "upper.yaml").write_text("base: lower.yaml\nmodel: {width: 64, encoding_options: {c: 3}}\n")
    config = load(tmp_path / "upper.yaml", {"train.steps": "700"})
    assert (config.model.layers, config.model.width, config.train.steps) == (2, 64, 700)
    assert config.model.encoding_options == {"c": 3}
    assert config.train.lr == load("small").train.lr


@pytest.mark.parametrize("given, meant", [("after", "after"), ("true", True), ("false", False), (True, True)])
def test_the_place_of_the_norm_is_one_setting(given: str | bool, meant: str | bool) -> None:
    config = load("paper-medium", {"model.qk_norm": given})
    assert config.model.qk_norm == meant and config.model.decoder().qk_norm == meant


@pytest.mark.parametrize(
    "recipe, overrides, says",
    [
        ("smal", {}, "no recipe or file 'smal'; did you mean small?"),
        ("small", {"train.step": 5}, "unknown setting 'train.step'; did you mean train.steps?"),
        ("small", {"model.encodign": "rope"}, "did you mean model.encoding?"),
        ("small", {"train.steps": "many"}, "train.steps must be a whole number"),
        ("small", {"train.steps": 0}, "train.steps must be at least 1, got 0"),
        ("small", {"train.lr": math.nan}, "train.lr"),
        (
            "small",
            {"train.min_lr": 1.0, "train.lr": 0.1},
            "train.min_lr (1) must not exceed train.lr (0.1); try --train.min_lr 0.01",
        ),
        ("demo", {"train.steps": 30}, "train.warmup (30) must be below train.steps (30); try --train.warmup"),
        ("small", {"train.batch": 8, "train.micro_batch": 3}, "multiple of train.micro_batch, got 8 and 3"),
        ("small", {"model.qk_norm": "behind"}, "'after'"),
        ("small", {"train.schedule": "linear"}, "'cosine' or 'wsd'"),
        ("small", {"model.encoding_options": "{a: "}, "the value of model.encoding_options is not valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(recipe: str, overrides: dict, says: str) -> None:
    with pytest.raises(LabError) as told:
        load(recipe, overrides)
    assert says in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("- 1\n- 2\n", "must be a mapping of settings, such as seed: 1, got a list"),
        ("train: {steps: [", "is not valid YAML"),
        ("train: 5\n", "train must be a mapping of settings, got 5"),
        ("base: nothing-like-it\n", "no recipe or file"),
        ("base: mine.yaml\n", "form a cycle"),
        ("model: {vocabulary: 5}\n", "unknown setting 'model.vocabulary'"),
    ],
)
def test_files_with_mistakes(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["train", str(tmp_path / "mine.yaml"), "--print-config"]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match="cannot read"):
        load(tmp_path / "mine.yaml")


def test_an_unknown_option_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small", "--train.stepz", "5", "--dry-run"]) == 2
    assert "unknown option '--train.stepz'; did you mean --train.steps?" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_takes_every_encoding(recipe: str, encoding: str) -> None:
    for shift in (False, True):
        changes = {"model.encoding": encoding, "model.kv_shift": shift, "model.layers": 1}
        with torch.device("meta"):
            model = Decoder(load(recipe, changes).model.decoder(257))
        assert all(p.is_meta for p in model.parameters())
        assert (model.model.layers[0].self_attn.kv_shift is not None) == shift


def test_the_papers_models_as_the_dry_run_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "paper-medium", "--encoding", "grape-ap", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in ("353.5M parameters", "480 x 4096", "1,966,080 tokens a step", "49.2B", "25,000 steps",
                 "0.001 at 2000", "GPU-hours"):  # fmt: skip
        assert part in said, said
    assert main(["train", "paper-large", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 772_234_496


def test_the_large_model_builds_on_meta() -> None:
    with torch.device("meta"):
        model = Decoder(load("paper-large").model.decoder())
    assert f"{model.parameter_count() / 1e6:.0f}M" == "772M"


def test_cosine_against_its_closed_form() -> None:
    train = TrainSection(steps=1000, warmup=100, lr=1e-3, min_lr=1e-4)
    assert learning_rate(0, train) == pytest.approx(1e-5)
    assert learning_rate(49, train) == pytest.approx(5e-4)
    assert learning_rate(99, train) == learning_rate(100, train) == 1e-3
    assert learning_rate(550, train) == pytest.approx((1e-3 + 1e-4) / 2)
    for step in range(100, 1000, 37):
        angle = math.pi * (step - 100) / 900
        assert learning_rate(step, train) == pytest.approx(1e-4 + 0.9e-3 * math.cos(angle / 2) ** 2)
    assert learning_rate(1000, train) == pytest.approx(1e-4)


def test_wsd_against_its_closed_form() -> None:
    train = TrainSection(steps=1000, warmup=100, lr=1e-3, min_lr=1e-4, schedule="wsd", decay=0.2)
    assert {learning_rate(step, train) for step in range(99, 801)} == {1e-3}
    assert learning_rate(900, train) == pytest.approx((1e-3 + 1e-4) / 2)
    for step in range(800, 1000, 23):
        assert learning_rate(step, train) == pytest.approx(1e-4 + 0.9e-3 * (1000 - step) / 200)
    assert learning_rate(1000, train) == pytest.approx(1e-4)


@given(st.sampled_from(["cosine", "wsd"]), st.integers(0, 30), st.integers(1, 60), st.floats(0, 1))
def test_a_schedule_rises_then_falls(schedule: str, warmup: int, more: int, decay: float) -> None:
    total = warmup + more
    train = TrainSection(steps=total, warmup=warmup, lr=1.0, min_lr=0.1, schedule=schedule, decay=decay)
    rates = [learning_rate(step, train) for step in range(train.steps)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) <= 1.0 and min(rates[warmup:]) >= 0.1


def test_encodings_start_from_the_same_matrices() -> None:
    """What differs between two models of one seed is their encoding alone."""
    first: dict[str, torch.Tensor] = {}
    for encoding in ENCODINGS:
        model = _fresh({"model.encoding": encoding}, seed=3)
        named = {n: p.detach() for n, p in model.named_parameters() if "encoding" not in n}
        first = first or named
        assert named.keys() == first.keys()
        assert all(torch.equal(first[n], named[n]) for n in named), encoding
    other = _fresh({"model.encoding": "rope"}, seed=4)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(other.get_parameter(name), first[name])


def _fresh(changes: dict, seed: int) -> Decoder:
    model = Decoder(load("demo", {"model.layers": 2, **changes}).model.decoder(257))
    initialise(model, seed)
    return model


def test_norms_do_not_decay() -> None:
    model = _fresh({"model.encoding": "grape-ap"}, seed=0)
    decayed, spared = adamw(model, TrainSection(weight_decay=0.3)).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert spared["params"] and all("norm" in names[id(p)] for p in spared["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(spared["params"]) + len(decayed["params"]) == len(names)


def test_settings_free_on_resume_exist() -> None:
    assert set(FREE_ON_RESUME) <= set(field_names())
    config = RunConfig()
    assert set(flat(config)) == set(field_names())
