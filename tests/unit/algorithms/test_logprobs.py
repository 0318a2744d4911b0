from __future__ import annotations

import pytest
import torch

from areal_sc.algorithms import logprobs as logprobs_module
from areal_sc.algorithms import vocabulary_sums
from areal_sc.algorithms.logprobs import (
    chunked_logprobs,
    chunked_top_logprobs,
    logprobs_of_logits,
    top_logprobs_of_logits,
)

NUM_TOKENS, WIDTH, VOCABULARY = 37, 16, 50


@pytest.fixture(params=["one after the other", "fused"], autouse=True)
def as_on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test, too, with the functions that CUDA devices get, here as plain ones."""
    if request.param == "fused":
        monkeypatch.setattr(vocabulary_sums, "FUSED_DEVICES", {"cpu"})
        monkeypatch.setattr(vocabulary_sums, "_cannot_compile", True)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def upstream() -> torch.Tensor:
    return torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)


def weighed(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient reaches both, with another factor at each token."""
    return (logprobs * upstream() + entropy * upstream().flip(0)).sum()


def mixed_temperatures() -> torch.Tensor:
    return torch.tensor([0.5, 1.0, 1.7])[torch.arange(NUM_TOKENS) % 3]


def reference(
    temperatures: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logprobs, entropy and both gradients in float64 with all logits."""
    hidden, weight, targets = inputs(dtype)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    divisor = torch.ones(NUM_TOKENS) if temperatures is None else temperatures
    logits = hidden @ weight.t() / divisor[:, None].double()
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = distribution.log_prob(targets), distribution.entropy()
    weighed(logprobs, entropy).backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk_tokens", [1, 10, 37, 1000])
@pytest.mark.parametrize("temperatures", [None, mixed_temperatures()], ids=["one", "mixed"])
def test_agrees_with_float64_full_logits(
    chunk_tokens: int, temperatures: torch.Tensor | None
) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = chunked_logprobs(
        hidden, weight, targets, temperatures=temperatures, chunk_tokens=chunk_tokens
    )
    weighed(logprobs, entropy).backward()
    found = [logprobs, entropy, hidden.grad, weight.grad]
    for value, expected in zip(found, reference(temperatures), strict=True):
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [2, 1000])
def test_gradient_is_exact_in_float64(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (7, 3), (7,))
    )
    targets = torch.tensor([0, 6, 3, 3, 1])
    temperatures = mixed_temperatures()[:5].double()

    def both(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_logprobs(
            *parts[:2],
            targets,
            bias=parts[2],
            temperatures=temperatures,
            chunk_tokens=chunk_tokens,
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))  # each alone


@pytest.mark.parametrize("chunk_tokens", [2, 1000])
def test_several_targets_of_each_token(chunk_tokens: int) -> None:
    """Values and gradients against full logits; a token may be asked for twice."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (7, 3), (7,))
    )
    targets = torch.randint(7, (5, 4), generator=generator)
    targets[:, 3] = targets[:, 0]
    temperatures = mixed_temperatures()[:5].double()
    upstream = torch.randn(5, 5, generator=generator, dtype=torch.float64)

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = (torch.cat([logprobs, entropy[:, None]], 1) * upstream).sum()
        return logprobs, entropy, *torch.autograd.grad(value, (hidden, weight, bias))

    found = chunked_logprobs(
        hidden, weight, targets, bias=bias, temperatures=temperatures, chunk_tokens=chunk_tokens
    )
    logits = (hidden @ weight.t() + bias) / temperatures[:, None]
    distribution = torch.distributions.Categorical(logits=logits)
    expected = (logits.log_softmax(-1).gather(1, targets), distribution.entropy())
    for value, right in zip(gradients(*found), gradients(*expected), strict=True):
        assert torch.allclose(value, right, rtol=1e-9, atol=1e-12)
    full = logprobs_of_logits(hidden @ weight.t() + bias, targets, temperatures=temperatures)
    for value, right in zip(full, expected, strict=True):
        assert torch.allclose(value, right, rtol=1e-12)


@pytest.mark.parametrize("top_k", [1, 7, VOCABULARY])
@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_the_most_probable_tokens(top_k: int, chunk_tokens: int) -> None:
    hidden, weight, _ = inputs()
    temperatures, bias = mixed_temperatures(), torch.linspace(-1, 1, VOCABULARY)
    logits = (hidden.double() @ weight.double().t() + bias) / temperatures[:, None]
    expected = logits.log_softmax(-1).topk(top_k)
    named = {"bias": bias, "temperatures": temperatures, "chunk_tokens": chunk_tokens}
    found = chunked_top_logprobs(hidden, weight, top_k, **named)
    assert not found[0].requires_grad
    rounded = hidden @ weight.t() + bias
    for logprobs, tokens in (
        found,
        top_logprobs_of_logits(rounded, top_k, temperatures=temperatures),
    ):
        assert torch.equal(tokens, expected.indices)
        assert torch.allclose(logprobs.double(), expected.values, atol=2e-5, rtol=1e-5)
    nothing = torch.zeros(0, dtype=torch.int64)
    for targets in (nothing, nothing.view(0, 3)):
        of_logits, _ = logprobs_of_logits(torch.zeros(0, VOCABULARY), targets)
        assert of_logits.shape == targets.shape
    for of_nothing in chunked_top_logprobs(hidden[:0], weight, top_k):
        assert of_nothing.shape == (0, top_k)


@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_bfloat16_inputs_are_accumulated_in_float32(chunk_tokens: int) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens)
    weighed(logprobs, entropy).backward()
    expected = reference(None, torch.bfloat16)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected[0], atol=2e-5)
    assert torch.allclose(entropy.double(), expected[1], atol=2e-5)
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for gradient, exact in ((hidden.grad, expected[2]), (weight.grad, expected[3])):
        assert (gradient.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_the_gradient_of_a_float32_output_layer_is_not_rounded(chunk_tokens: int) -> None:
    """Hidden states are bfloat16, and logits are of values that are rounded to it."""
    hidden, weight, targets = inputs(torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens)
    weighed(logprobs, entropy).backward()
    expected = reference(None, torch.bfloat16)
    assert torch.allclose(logprobs.double(), expected[0], atol=2e-5)
    assert hidden.grad.dtype == torch.bfloat16
    assert (hidden.grad.double() - expected[2]).abs().max() <= 2**-8 * expected[2].abs().max()
    assert weight.grad.dtype == torch.float32
    assert torch.allclose(weight.grad.double(), expected[3], atol=2e-5)
    further = (weight.detach() * (1 + 2**-10)).requires_grad_()  # rounds to the same
    same, _ = chunked_logprobs(hidden, further, targets, chunk_tokens=chunk_tokens)
    assert torch.equal(same, logprobs)


def test_backward_twice_gives_the_same() -> None:
    hidden, weight, targets = inputs()
    logprobs, _ = chunked_logprobs(hidden, weight, targets)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_full_logits_give_the_same() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets, temperatures = torch.tensor([0, 6, 3, 3, 1]), mixed_temperatures()[:5].double()

    def both(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_of_logits(logits, targets, temperatures=temperatures)

    distribution = torch.distributions.Categorical(logits=logits / temperatures[:, None])
    torch.testing.assert_close(both(logits)[1], distribution.entropy())
    assert torch.autograd.gradcheck(both, (logits.requires_grad_(),))


def test_a_certain_token_has_a_finite_gradient() -> None:
    """The probabilities of the others are 0 in float32."""
    hidden = torch.tensor([[1e3, 0.0]], requires_grad=True)
    _, entropy = chunked_logprobs(hidden, torch.eye(2), torch.tensor([0]))
    entropy.sum().backward()
    assert entropy.item() == 0
    assert hidden.grad.abs().max() == 0


def test_no_tokens() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = chunked_logprobs(hidden.detach() * 1e4, weight.detach(), targets)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()


def test_large_logits_lose_no_digits() -> None:
    """Logits near 100, whose spacing in float32 is 7.6e-6; the result is near 0 and fine."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, VOCABULARY, generator=generator) * 2 + 90
    logits[:, 7] = 100.0
    targets = torch.full((200,), 7)
    logprobs, entropy = chunked_logprobs(logits, torch.eye(VOCABULARY), targets)  # exact product
    exact = torch.distributions.Categorical(logits=logits.double())
    assert (logprobs.double() - exact.log_prob(targets)).abs().max() < 5e-7
    assert (entropy.double() - exact.entropy()).abs().max() < 5e-7


@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_output_layers_with_a_bias(chunk_tokens: int) -> None:
    hidden, weight, targets = inputs()
    bias = torch.linspace(-1, 1, VOCABULARY).requires_grad_()
    temperatures = mixed_temperatures()
    logprobs, entropy = chunked_logprobs(
        hidden, weight, targets, bias=bias, temperatures=temperatures, chunk_tokens=chunk_tokens
    )
    (logprobs * upstream()).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = exact[0] @ exact[1].t() + exact[2]
    distribution = torch.distributions.Categorical(logits=logits / temperatures[:, None].double())
    expected = distribution.log_prob(targets)
    (expected * upstream()).sum().backward()
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), distribution.entropy(), atol=1e-5)
    for found, reference_tensor in zip((hidden, weight, bias), exact, strict=True):
        assert torch.allclose(found.grad.double(), reference_tensor.grad, atol=2e-5)
    from_logits = logprobs_of_logits(logits, targets, temperatures=temperatures.double())
    assert torch.allclose(from_logits[0], expected)
    assert torch.allclose(from_logits[1], distribution.entropy())


def test_tokens_that_a_model_rules_out_add_nothing_to_the_entropy() -> None:
    """Logits of -inf, as models give to the padding of their vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 9, generator=generator)
    logits[:, 6:] = -torch.inf
    targets = torch.tensor([0, 5, 2, 1])
    inside = logits[:, :6].double().requires_grad_()
    logprobs = inside.log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    expected.square().sum().backward()
    logits.requires_grad_()
    _, entropy = logprobs_of_logits(logits, targets)
    entropy.square().sum().backward()
    torch.testing.assert_close(entropy.double(), expected)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, :6].double(), inside.grad, atol=1e-6, rtol=1e-5)
    assert (logits.grad[:, 6:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_a_bias_that_rules_tokens_out_leaves_the_others_as_they_are(
    chunk_tokens: int, dtype: torch.dtype
) -> None:
    hidden, weight, targets = inputs()
    inside, targets = weight.detach()[:-3].clone().requires_grad_(), targets.clamp(max=9)
    expected = chunked_logprobs(hidden, inside, targets, chunk_tokens=chunk_tokens)
    weighed(*expected).backward()
    of_hidden, hidden.grad = hidden.grad, None
    bias = torch.zeros(VOCABULARY, dtype=dtype)
    bias[-3:] = -torch.inf
    found = chunked_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=chunk_tokens)
    weighed(*found).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(hidden.grad, of_hidden, atol=1e-5, rtol=1e-5)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:-3], inside.grad, atol=1e-5, rtol=1e-5)
    assert not weight.grad[-3:].any()


@pytest.mark.parametrize("temperatures", [None, mixed_temperatures()], ids=["one", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_kept_in_16_bits_gives_the_gradients_of_float64(
    dtype: torch.dtype, temperatures: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU's functions are used. Each probability is rounded once, by half a unit."""
    products = list[int]()
    plain = logprobs_module.output_logits

    def counting(hidden: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        products.append(len(hidden))
        return plain(hidden, *others)

    monkeypatch.setattr(logprobs_module, "output_logits", counting)
    hidden, weight, targets = inputs(dtype)
    found = chunked_logprobs(
        hidden,
        weight,
        targets,
        temperatures=temperatures,
        chunk_tokens=10,
        kept_tokens=NUM_TOKENS,
    )
    weighed(*found).backward()
    keeps = vocabulary_sums.is_fused(hidden) and dtype is torch.bfloat16
    assert sum(products) == (1 if keeps else 2) * NUM_TOKENS
    assert hidden.grad is not None
    assert weight.grad is not None
    exact = reference(temperatures, dtype)
    unit = torch.finfo(dtype).eps
    for values, expected in zip([*found, hidden.grad, weight.grad], exact, strict=True):
        scale = float(expected.abs().max())
        assert float((values.detach().double() - expected).abs().max()) < 4 * unit * scale


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(vocabulary_sums, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(vocabulary_sums, "_cannot_compile", False)
    return monkeypatch


# torch's compiler warns of its own code
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("as_on_a_device", ["fused"], indirect=True)
def test_what_is_compiled_agrees_with_float64(compiling: pytest.MonkeyPatch) -> None:
    """For chunks of any length: the last one has three tokens, then seven."""
    for temperatures in (None, mixed_temperatures()):
        for chunk_tokens in (17, 10):
            test_agrees_with_float64_full_logits(chunk_tokens, temperatures)
    assert not vocabulary_sums._cannot_compile


@pytest.mark.parametrize("as_on_a_device", ["fused"], indirect=True)
def test_where_torch_cannot_compile_it_is_told_once(
    compiling: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(refuse, RuntimeError("no C compiler"), None)

    compiling.setattr(vocabulary_sums, "_compiled", lambda _: refuse)
    for _ in range(2):
        test_agrees_with_float64_full_logits(10, None)
    (message,) = [it.getMessage() for it in caplog.records]
    assert message.startswith("the output layer is not compiled, and slower: ")
    assert "no C compiler" in message
