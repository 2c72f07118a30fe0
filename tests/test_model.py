"""The decoder: every encoding, cached = uncached, packed = alone, padded = unpadded."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import grape_pe as grape
from grape_pe.attention import decode
from grape_pe.models import Decoder, DecoderConfig, cross_entropy
from grape_pe.testing import TOL

NAMES = [*grape.names(), "rope+fox", "grape-m+grape-ap"]
V = 61


def small(encoding="rope", **options):
    torch.manual_seed(0)
    config = DecoderConfig(
        **{
            "vocab_size": V,
            "width": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "encoding": encoding,
            **options,
        }
    )
    model = Decoder(config).double().eval()
    with torch.no_grad():  # away from the initial values, where gates are still
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch=2, length=12, seed=1):
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got, want, dtype=torch.float64):
    torch.testing.assert_close(got, want, rtol=TOL[dtype], atol=TOL[dtype])


def test_paper_sizes_on_meta():
    with torch.device("meta"):
        medium, large = Decoder(DecoderConfig.medium()), Decoder(DecoderConfig.large())
    # 24 (4 C^2 + 3 C floor(8C/3) + 2 C + 2 D) + V C + C with C = 1024, D = 128, V = 50304
    assert medium.parameter_count() == 353_508_352
    assert large.parameter_count() == 772_234_496
    assert next(medium.parameters()).is_meta


@pytest.mark.parametrize("name", NAMES)
def test_meta_then_reset_is_a_model(name):
    config = DecoderConfig(vocab_size=V, width=32, layers=1, heads=2, encoding=name)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert model(tokens()).isfinite().all()


def test_init_scales():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=2000, width=256, layers=4, heads=4))
    block = model.model.layers[0]
    std = 0.5 / 256**0.5
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.self_attn.o_proj.weight.std().item() == pytest.approx(std / 2, rel=0.05)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(std / 2, rel=0.05)


@pytest.mark.parametrize("kv_shift", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_cached_is_uncached(name, kv_shift):
    model, ids = small(name, kv_shift=kv_shift), tokens()
    with torch.no_grad():
        want = model(ids)
        cache = model.cache()
        got = [model(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 12))]
        close(torch.cat(got, 1), want)
        cache.crop(4)
        close(model(ids[:, 8:], cache=cache), want[:, 8:])
        cache.crop(3).select(torch.tensor([1, 0]))
        close(model(ids.flip(0)[:, 9:], cache=cache), want.flip(0)[:, 9:])


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_changes_nothing(name):
    model, ids = small(name, kv_shift=True), tokens(1, 7)
    filler = tokens(1, 4, seed=9)
    padding = torch.tensor([[True] * 4 + [False] * 7, [False] * 11])
    batch = torch.cat([torch.cat([filler, ids], 1), tokens(1, 11, seed=3)])
    with torch.no_grad():
        want = model(ids)[0]
        close(model(batch, padding=padding)[0, 4:], want)
        cache = model.cache()
        first = model(batch[:, :9], padding=padding[:, :9], cache=cache)
        rest = model(batch[:, 9:], cache=cache)
        close(torch.cat([first, rest], 1)[0, 4:], want)
        wrong = model(batch)[0, 4:]
    assert (wrong - want).abs().max() > 1e-3 or name in ("nope",)


#: right-padded, padded in between, and both in several calls: the cuts of the calls, and the padding
PADDINGS = {
    "right": ((0, 8, 9, 12), [5, 6, 7]),
    "between": ((0, 4, 8, 12), [1, 2, 5, 9]),
    "everywhere": ((0, 3, 9, 12), [0, 1, 2, 4, 7, 8, 11]),
}


@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_padding_anywhere_changes_nothing(name, kind):
    model, batch = small(name, kv_shift=True), tokens(2, 12)
    cuts, hidden = PADDINGS[kind]
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, hidden] = True
    kept = ~padding[0]
    with torch.no_grad():
        want = model(batch[:1, kept])[0], model(batch[1:])[0]
        for cached in (False, True):
            cache = model.cache() if cached else None
            parts = list(itertools.pairwise(cuts)) if cached else [(0, 12)]
            got = torch.cat([model(batch[:, a:b], padding=padding[:, a:b], cache=cache) for a, b in parts], 1)
            close(got[0, kept], want[0])
            close(got[1], want[1])


def test_kv_shift_is_the_published_formula():
    """Shift the projected keys and values, then normalise the keys; from zero at the start of a document."""
    model, ids = small("rope", kv_shift=True), tokens()
    attention = model.model.layers[0].self_attn
    seen = []
    hook = attention.encoding.register_forward_hook(
        lambda _, args, kw, __: seen.append((args[1], kw["v"])), with_kwargs=True
    )
    documents = torch.tensor([0] * 5 + [1] * 7)
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        model(ids)
        model(ids, documents=documents)
        cache = model.cache()
        for part in (slice(0, 4), slice(4, 5), slice(5, 12)):
            model(ids[:, part], cache=cache)
    hook.remove()
    for k, v, starts in (
        (*seen[0], [0]),
        (*seen[1], [0, 5]),
        (*(torch.cat(t, 2) for t in zip(*seen[2:], strict=True)), [0]),
    ):
        for got, proj, gate, norm in (
            (k, attention.k_proj, attention.kv_shift.gate_k, attention.k_norm),
            (v, attention.v_proj, attention.kv_shift.gate_v, None),
        ):
            now = proj(x).unflatten(-1, (2, 8))
            before = torch.cat([torch.zeros_like(now[:, :1]), now[:, :-1]], 1)
            before[:, starts] = 0.0
            a = torch.sigmoid(gate(x)).unsqueeze(-1)
            want = a * before + (1 - a) * now
            if norm is not None:
                want = want / (want.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
            close(got, want.transpose(1, 2))


def test_a_decoding_step_reads_no_values(monkeypatch):
    model, ids = small("rope+fox", kv_shift=True), tokens()
    cache = model.cache()

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    with torch.no_grad():
        want = model(ids)
        model(ids[:, :11], cache=cache)
        monkeypatch.setattr(decode, "readable", lambda _: False)  # as on a GPU
        for method in ("__bool__", "item", "tolist", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, method, refuse)
        got = model(ids[:, 11:], cache=cache)
        monkeypatch.undo()
    close(got, want[:, 11:])


def test_decoding_through_a_model_skips_keys():
    model = Decoder(DecoderConfig(vocab_size=V, width=32, layers=1, heads=2, encoding="alibi")).eval()
    ids = tokens(1, 3000)
    cache = model.cache()
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)
        with grape.record_pruning() as report:
            model(ids[:, -1:], cache=cache)
    assert report.fraction > 0.1, report


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_alone(name):
    options = {"encoding_options": {"conv": 0}} if name == "path" else {}
    model = small(name, kv_shift=True, **options)
    parts = [tokens(1, n, seed=n) for n in (5, 3, 4)]
    packed = torch.cat(parts, 1)
    documents = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)
    positions = torch.tensor([[*range(5), *range(3), *range(4)]])
    with torch.no_grad():
        want = torch.cat([model(part) for part in parts], 1)
        close(model(packed, documents=documents), want)
        close(model(packed, positions=positions), want)
        cache = model.cache()
        got = [model(packed[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in ((0, 6), (6, 12))]
        close(torch.cat(got, 1), want)
        assert (model(packed) - want).abs().max() > 1e-3


def test_path_convolution_refuses_packing():
    with pytest.raises(ValueError, match="conv"):
        small("path")(tokens(), documents=torch.tensor([0] * 6 + [1] * 6))


def test_shared_encoding_is_one_module():
    model = small("grape-m", shared_encoding=True)
    names = [name for name, _ in model.named_parameters() if "frequencies" in name]
    assert names == ["model.encoding.frequencies.delta"]
    own = [n for n, _ in small("grape-m").named_parameters() if "frequencies" in n]
    assert len(own) == 2
    cache = model.cache()
    ids = tokens()
    with torch.no_grad():
        got = torch.cat([model(ids[:, :5], cache=cache), model(ids[:, 5:], cache=cache)], 1)
        close(got, model(ids))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 8), (2, 4, 3, 8)])
def test_norm_is_torchs(shape):
    from grape_pe.layers import RMSNorm

    torch.manual_seed(0)
    norm, x = RMSNorm(shape[-1], 1e-5).double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
    want = F.rms_norm(x, shape[-1:], norm.weight, 1e-5)
    close(norm(x), want)
    grad = torch.randn(shape, dtype=torch.float64)
    got = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    for a, b in zip(got, torch.autograd.grad(want, (x, norm.weight), grad), strict=True):
        close(a, b)
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("chunk", [1, 64, 200, 10**6])
def test_cross_entropy_is_torchs(chunk, monkeypatch):
    monkeypatch.setattr("grape_pe.models.loss.CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    targets = tokens(2, 9)
    targets[0, 3] = -100
    want = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(want, (hidden, weight))
    got = cross_entropy(hidden, weight, targets)
    close(got, want, torch.float32)
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), expected, strict=True):
        close(a, b, torch.float32)


def test_a_gpu_forms_the_logits_of_a_paper_batch_in_few_chunks(monkeypatch):
    """80 GB: 16,384 tokens of a vocabulary of 50,304 in three chunks; the CPU keeps to its cache."""
    from types import SimpleNamespace

    from grape_pe.models import loss

    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    head = SimpleNamespace(shape=(50304, 8), device=torch.device("cuda"))
    assert loss.chunk_rows(head) == 80 * 2**30 // 256 // 50304 and -(-16384 // loss.chunk_rows(head)) == 3
    assert loss.chunk_rows(torch.empty(50304, 0)) == 166


def test_rows_without_a_target_are_not_computed(monkeypatch):
    from grape_pe.models import loss

    seen = []
    dense = loss._dense
    monkeypatch.setattr(
        loss, "_dense", lambda hidden, *more: seen.append(len(hidden)) or dense(hidden, *more)
    )
    hidden = torch.randn(6, 8, requires_grad=True)
    targets = torch.tensor([-100, 3, -100, -100, 1, -100])
    cross_entropy(hidden, torch.randn(5, 8), targets).backward()
    assert seen == [2]
    assert hidden.grad[targets < 0].abs().sum() == 0 and (hidden.grad[targets >= 0].abs().sum(1) > 0).all()


@pytest.mark.parametrize("encoding", ["rope", "fox", "grape-ap", "path"])
@pytest.mark.parametrize("options", [{}, {"output_gate": True, "output_norm": True}, {"checkpointing": True}])
def test_last_layer_computes_only_what_targets_need(encoding, options, monkeypatch):
    torch.manual_seed(0)
    options = dict(options)
    checkpointing = options.pop("checkpointing", False)
    model = Decoder(DecoderConfig(64, 32, layers=2, heads=2, encoding=encoding, **options)).double().train()
    model.gradient_checkpointing = checkpointing
    tokens, targets = torch.randint(0, 64, (2, 2, 12))
    targets[torch.rand(2, 12) < 0.7] = -100
    rows = []
    model.model.norm.register_forward_hook(lambda *call: rows.append(call[2].shape[:2].numel()))

    def gradients():
        model.zero_grad()
        loss = model(tokens, targets=targets)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    few, bound = gradients(), TOL[torch.float32]  # the loss is float32
    monkeypatch.setattr(grape.models.decoder, "counted_rows", lambda targets: None)
    for got, want in zip(few, gradients(), strict=True):
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    assert rows == [int((targets >= 0).sum()), targets.numel()]


def test_no_target_at_all_gives_zero_gradients():
    model = Decoder(DecoderConfig(64, 32, layers=1, heads=2)).train()
    model(torch.zeros(1, 4, dtype=torch.long), targets=torch.full((1, 4), -100)).backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_cross_entropy_of_nothing_is_zero_and_op_is_sound():
    from grape_pe.models.loss import _chunked

    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    assert cross_entropy(hidden, weight, torch.full((4,), -100)).item() == 0.0
    torch.library.opcheck(_chunked, (hidden, weight, torch.tensor([1, 2, -100, 4]), True, True))


def test_tied_embedding_gets_both_gradients_and_checkpointing_changes_nothing():
    model = small("grape-ap", kv_shift=True).train()
    ids = tokens()
    logits = model(ids)
    want = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    expected = torch.autograd.grad(want, list(model.parameters()))
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        grads = torch.autograd.grad(model(ids, targets=ids), list(model.parameters()))
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the loss is summed in float32


@pytest.mark.parametrize(
    "name", ["rope", "grape-m-ctx", "fox", "grape-a-qk", "grape-ap", "rope+fox", "grape-m+grape-ap"]
)
def test_training_step_compiles_whole(name):
    torch._dynamo.reset()  # every case is another model in the same code
    model, ids = small(name, kv_shift=True).float().train(), tokens()
    documents = torch.tensor([0] * 5 + [1] * 7)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for given in ({}, {"documents": documents}):
        want = model(ids, targets=ids, **given)
        got = compiled(ids, targets=ids, **given)
        close(got, want, torch.float32)
        got.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_training_step_compiles_with_inductor():
    torch._dynamo.reset()  # every case is another model in the same code
    model, ids = small("grape-ap").float().train(), tokens()
    compiled = torch.compile(model, fullgraph=True)
    close(compiled(ids, targets=ids), model(ids, targets=ids), torch.float32)


def test_bfloat16_activations():
    model, ids = small("grape-m+grape-ap").float(), tokens()
    want = model(ids, targets=ids)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(ids, targets=ids)
    assert got.dtype == torch.float32 and abs(got.item() - want.item()) < TOL[torch.bfloat16]
    model.to(torch.bfloat16)
    assert model(ids).dtype == torch.bfloat16
    assert abs(model(ids, targets=ids).item() - want.item()) < TOL[torch.bfloat16]
    assert all(
        p.dtype == torch.float32 for n, p in model.named_parameters() if n.endswith("frequencies.delta")
    )


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"width": 0}, "width"),
        ({"heads": 4, "kv_heads": 3}, "multiple"),
        ({"encoding": "ropee"}, "did you mean"),
        ({"encoding_options": {"bse": 1}}, "did you mean"),
    ],
)
def test_bad_configs(wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        Decoder(DecoderConfig(**{"vocab_size": V, "width": 32, "layers": 1, "heads": 2, **wrong}))


def test_training_reduces_the_loss():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=V, width=32, layers=2, heads=2, encoding="grape-m+grape-ap"))
    ids = tokens(4, 17)
    adam = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        loss = model(ids[:, :-1], targets=ids[:, 1:])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_cache_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"model\.cache\(\)"):
        small()(tokens(), cache=small().cache())


def test_a_forked_cache_is_independent():
    model, ids = small("rope+fox", kv_shift=True), tokens()
    with torch.no_grad():
        cache = model.cache()
        model(ids[:, :6], cache=cache)
        twin = cache.fork()
        model(ids[:, :3], cache=cache)
        torch.testing.assert_close(model(ids[:, 6:], cache=twin), model(ids)[:, 6:])


def test_tokens_of_one_axis_are_refused():
    with pytest.raises(ValueError, match="batch, tokens"):
        small()(tokens()[0])
