"""Conversion as a user sees it: what stays as it was, what runs low, and the ways in and out."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from nets import Net, low_share
from torch import fx, nn

import amp_graph
from amp_graph import ConversionWarning, Policy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_converts_in_place_and_keeps_the_module_what_it_was() -> None:
    model = Net()
    attributes, keys, parameters = (
        set(vars(model)),
        list(model.state_dict()),
        list(model.parameters()),
    )
    assert amp_graph.convert(model, policy="bfloat16") is model
    out = model(torch.randn(4, 8))
    assert out.dtype is torch.float32
    assert type(model) is Net
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    ours = {"_call_impl", "_replicate_for_data_parallel", "__deepcopy__", "__reduce_ex__"}
    assert set(vars(model)) - attributes == ours
    amp_graph.restore(model)
    assert set(vars(model)) == attributes


def test_restore_gives_the_float32_numbers_back() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    before = model(x)
    amp_graph.convert(model)
    mixed = model(x)
    assert not torch.equal(mixed, before)
    torch.testing.assert_close(mixed, before, rtol=3e-2, atol=3e-2)
    assert torch.equal(amp_graph.restore(model)(x), before)


def test_converting_twice_says_so_and_changes_nothing() -> None:
    model = amp_graph.convert(Net())
    slot = model.__dict__["_call_impl"]
    with pytest.warns(ConversionWarning, match="converted already"):
        amp_graph.convert(model, policy="float16")
    assert model.__dict__["_call_impl"] is slot


def test_example_inputs_capture_at_once_and_leave_buffers_alone() -> None:
    model = Net()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    amp_graph.convert(model, example_inputs=(torch.randn(4, 8),))
    assert len(amp_graph.plans(model)) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not torch.equal(torch.get_rng_state(), random)  # the randn of this test, no more
    model(torch.randn(4, 8), scale=1.0)


def test_a_buffer_may_require_a_gradient() -> None:
    model = Net()
    model.register_buffer("table", torch.randn(3, requires_grad=True))
    table = model.table.detach().clone()
    amp_graph.convert(model, example_inputs=(torch.randn(4, 8),))
    assert model.table.requires_grad and model.table.is_leaf and torch.equal(model.table, table)


class Interrupted(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("make", "error"), [(lambda: nn.Linear(7, 7), RuntimeError), (Interrupted, KeyboardInterrupt)]
)
def test_a_model_that_raises_on_example_inputs_is_as_it_was(make: Any, error: Any) -> None:
    model = make()
    attributes, optimizer = dict(vars(model)), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error):
        amp_graph.convert(model, optimizer, policy="float16", example_inputs=(torch.randn(4, 8),))
    assert vars(model) == attributes and "step" not in vars(optimizer)


def test_converting_again_after_a_mistake_converts_everything() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError):
        amp_graph.convert(model, optimizer, example_inputs=(torch.randn(4, 7),))
    amp_graph.convert(model, optimizer, policy="float16", example_inputs=(torch.randn(4, 8),))
    assert amp_graph.plans(model)[0].dtype is torch.float16
    model(torch.randn(4, 8)).mean().backward()
    assert optimizer.step() is True


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Linear(4, 4), [torch.randn(2, 4)]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [torch.randn(2, 4)]),
        (nn.Conv2d(3, 4, 3), [torch.randn(2, 3, 8, 8)]),
        (nn.LSTM(4, 4, num_layers=2, bidirectional=True), [torch.randn(5, 2, 4)]),
        (nn.GRU(4, 4, batch_first=True), [torch.randn(2, 5, 4)]),
        (nn.RNN(4, 4), [torch.randn(5, 2, 4)]),
        (nn.LSTMCell(4, 4), [torch.randn(2, 4)]),
        (nn.MultiheadAttention(4, 2), [torch.randn(3, 2, 4)] * 3),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), [torch.randn(3, 2, 4)]),
        (nn.Transformer(4, 2, 1, 1, 8, dropout=0.0), [torch.randn(3, 2, 4), torch.randn(2, 2, 4)]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_layers_of_torch_nn_as_the_model(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    amp_graph.convert(model)
    model(*inputs)
    assert amp_graph.plans(model)
    assert low_share(model, *inputs) >= 0.9


def test_modes_and_gradients() -> None:
    model, x = amp_graph.convert(Net()), torch.randn(4, 8)
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    tracked = model.norm.num_batches_tracked.item()
    model.eval()
    with torch.no_grad():
        a = model(x)
    with torch.inference_mode():
        b = model(x)
    assert torch.equal(a, b)
    assert low_share(model, x) == 1
    assert model.norm.num_batches_tracked.item() == tracked
    assert model.norm.running_mean.dtype is torch.float32


def test_output_dtype_and_keep_float32() -> None:
    policy = Policy(dtype="bfloat16", output_dtype="bfloat16", keep_float32=("second",))
    model, x = amp_graph.convert(Net(), policy=policy), torch.randn(4, 8)
    assert model(x).dtype is torch.bfloat16
    assert low_share(model, x) == 0.5
    assert torch.func.vmap(model.eval())(x[:, None]).dtype is torch.bfloat16  # not captured


def test_default_dtype_follows_the_device() -> None:
    assert Policy().dtype_for({"cpu"}) is torch.bfloat16
    assert Policy().dtype_for({"cuda"}) is torch.float16
    assert Policy().dtype_for({"cpu", "cuda"}) is torch.float16
    assert Policy(dtype="float16").dtype_for({"cpu"}) is torch.float16


def test_a_model_on_the_meta_device() -> None:
    model = amp_graph.convert(Net().to("meta"))
    assert model(torch.randn(4, 8, device="meta")).dtype is torch.float32
    assert "linear" in amp_graph.plans(model)[0].low


def test_backend_by_name() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="amp_graph", options={"dtype": "bfloat16"})
    assert low_share(compiled, x) == 1
    misspelt = torch.compile(Net(), backend="amp_graph", options={"dtyp": "bfloat16"})
    with pytest.raises(Exception, match=r"'dtyp' is no field of .*Did you mean 'dtype'"):
        misspelt(x)
    scaled = torch.compile(Net(), backend="amp_graph", options={"loss_scale": 128.0})
    with pytest.raises(Exception, match=r"'loss_scale' is for convert"):
        scaled(x)


def test_graphs_of_the_backend_share_low_precision_weights() -> None:
    """As those of one model in training and in evaluation, which it is handed one by one."""
    model, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="amp_graph", options={"dtype": "bfloat16"})
    weights = [p.shape for p in model.parameters()]

    def kept() -> int:
        """How many pieces of memory there are that low-precision weights are in."""
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        low = [t for t in tensors if t.dtype is torch.bfloat16 and t.shape in weights]
        return len({t.data_ptr() for t in low})

    before = kept()
    compiled(x).sum().backward()
    in_training = kept()
    with torch.no_grad():
        compiled(x)
    assert kept() == in_training > before


def test_module_paths_of_the_backend_begin_in_the_model() -> None:
    """However the code that is compiled calls it."""
    policy = {"dtype": "bfloat16", "keep_float32": ("second",)}
    module_of_others = Net()

    @torch.compile(backend="amp_graph", options=policy)
    def call(x: torch.Tensor) -> torch.Tensor:
        return module_of_others(x)

    assert low_share(call, torch.randn(4, 8)) == 0.5


def test_nothing_to_convert_says_why() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = amp_graph.convert(Scale())
    with pytest.warns(ConversionWarning, match="nothing of Scale was converted: no operator"):
        model(torch.randn(4))
    report = amp_graph.explain(model)
    assert "Nothing was converted: no operator of it is on the allow list" in str(report)
    assert report.data.nothing in report._repr_html_()


class OwnAutocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("make", "policy", "why"),
    [
        (OwnAutocast, Policy(), "under torch.autocast already .*own autocast region"),
        (nn.Linear, Policy(keep_float32=("*",)), r"not .*keep_float32=\*"),
    ],
)
def test_operators_that_are_not_converted_say_why(
    make: type[nn.Linear], policy: Policy, why: str
) -> None:
    model = amp_graph.convert(nn.Sequential(make(4, 4)), policy=policy)
    with pytest.warns(ConversionWarning, match=f"its operators on the allow list are {why}"):
        model(torch.randn(2, 4))


class CallsForward(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class CallsOn(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


def test_a_call_that_passes_a_conversion_by_is_noticed(recwarn: pytest.WarningsRecorder) -> None:
    for plain in (CallsOn(8, 4), fx.symbolic_trace(Net())):
        model = amp_graph.convert(plain)
        model(torch.randn(2, 8))
        assert amp_graph.plans(model) and not recwarn
    with pytest.warns(ConversionWarning, match="CallsForward has a __call__ of its own"):
        model = amp_graph.convert(CallsForward(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):  # nor is it said that nobody calls it
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert not recwarn


class Gathered(nn.Module):
    """As FSDP leaves a module between two uses (`use_orig_params=False`): an attribute is a view of
    gathered parameters, whose memory was given back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.gathered = torch.ones(1024)
        self.gathered.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_memory_that_was_given_back_is_not_read() -> None:
    model = amp_graph.convert(Gathered(), policy="bfloat16")
    model(torch.randn(4, 8)).sum().backward()  # ended the process
    assert low_share(model, torch.randn(4, 8)) > 0
