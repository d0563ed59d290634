"""Which models of a script are converted at their first call, and which are left alone."""

from __future__ import annotations

import copy
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from nets import X, net
from torch import nn
from torch.optim.swa_utils import AveragedModel

import amp_graph
from amp_graph.autopatch import first_call
from amp_graph.autopatch.summary import summary_of


def decided(installation) -> dict[str, str]:
    return {m.name: m.left_alone for m in installation.models.seen}


def test_the_outermost_module_is_converted_and_what_is_outside_stays_float32(start):
    installation, model = start(), net()
    criterion = mock.Mock(wraps=nn.CrossEntropyLoss())
    criterion(model(X), torch.zeros(4, dtype=torch.long)).backward()
    assert decided(installation) == {"Sequential": ""}
    assert criterion.call_args.args[0].dtype is torch.float32
    assert not amp_graph.is_converted(model[0])
    model.eval()[0](X)  # a part of it that is looked at
    assert len(installation.models.seen) == 1
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class Container(nn.Module):
    """No parameters: the network is not registered."""

    def __init__(self, network):
        super().__init__()
        self.networks = [network]

    def forward(self, x):
        return self.networks[0](x)


class Late(nn.Module):
    """Gets its parameters in its first call."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def forward(self, x):
        self.layer = self.layer or nn.Linear(8, 3)
        return self.layer(x)


def test_models_inside_of_a_module_without_parameters_are_converted(start):
    installation, model = start(), net()
    Container(model)(X)
    assert amp_graph.is_converted(model)
    assert decided(installation) == {"Sequential": ""}


def test_a_module_that_gets_its_parameters_late_is_converted_then(start):
    start()
    late, lazy = Late(), nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(3))
    for model in (late, lazy):
        first = model(X)
        assert not amp_graph.is_converted(model)
        assert torch.allclose(model(X), first, atol=0.05)
        assert amp_graph.is_converted(model)


def test_a_model_that_leaves_the_meta_device_is_converted_then(start, capsys):
    installation, model = start(), net().to("meta")
    for _ in range(2):
        assert model(X.to("meta")).is_meta
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    model[2].reset_parameters()
    model(X)
    assert amp_graph.is_converted(model) and decided(installation) == {"Sequential": ""}
    assert capsys.readouterr().err.count("is left as it is") == 1


def test_a_weight_that_is_read_outside_of_a_model_is_what_it_was(start):
    """A parametrization is a module that is called when the weight is read, and once more, to be
    kept, when it is removed."""
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    exact = layer.weight.detach().clone()
    installation = start()
    assert torch.equal(layer.weight, exact)
    assert not installation.models.seen
    layer(X)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, exact)
    assert amp_graph.is_converted(layer)


def test_threads_that_call_a_new_model_at_once_convert_it_once(start):
    installation, model, converted = start(), net(), []
    convert = first_call.convert_at_first_call

    def slowly(inner, policy):
        time.sleep(0.05)
        converted.append(inner)
        return convert(inner, policy)

    with (
        mock.patch.object(first_call, "convert_at_first_call", slowly),
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(model, [X] * 4))
    assert converted == [model] and len(installation.models.seen) == 1


class Odd(nn.Linear):
    """Compares itself by value and so cannot be hashed, which nn.Module.modules() asks for."""

    def __eq__(self, other):
        return isinstance(other, Odd)

    __hash__ = None


def test_a_module_whose_parameters_cannot_be_listed_is_left_alone(start, capsys):
    start()
    odd = Odd(8, 3)
    with pytest.raises(TypeError):
        odd.parameters().__next__()
    for _ in range(2):
        assert odd(X).shape == (4, 3)
    said = capsys.readouterr().err  # Python 3.14 says more
    assert said.startswith("amp_graph: Odd is left as it is: TypeError: ")
    assert said.count("unhashable type: 'Odd'") == said.count("\n") == 1


@pytest.mark.parametrize("failing", ["convert_at_first_call", "why_not", "unwrapped"])
def test_a_failure_of_ours_leaves_the_model_running(start, capsys, failing):
    model = net()
    expected = model(X)
    start()
    with mock.patch.object(first_call, failing, side_effect=KeyError("a\nb")):
        for _ in range(2):
            assert torch.equal(model(X), expected)
    said = capsys.readouterr().err
    assert said == "amp_graph: Sequential is left as it is: KeyError: 'a\\nb'\n"


def test_models_that_prepare_data_in_workers_stay_as_they_are(start):
    installation, model = start(), net()
    with mock.patch.object(first_call, "get_worker_info"):
        model(X)
    assert not amp_graph.is_converted(model) and not installation.models.seen
    model(X)
    assert amp_graph.is_converted(model)


def test_copies_and_state_dicts_of_converted_models(start):
    installation, model = start(), net()
    keys = list(model.state_dict())
    model(X)
    average = copy.deepcopy(model)
    average(X)
    assert list(model.state_dict()) == keys
    assert amp_graph.is_converted(average)
    assert [(m.left_alone, m.record is not None) for m in installation.models.seen] == [
        ("", True)
    ] * 2
    installation.undo()
    assert not amp_graph.is_converted(model) and not amp_graph.is_converted(average)


def test_a_copy_of_a_converted_model_inside_of_another_model(start, recwarn):
    installation, model = start(), net()
    model(X)
    average = AveragedModel(model)
    average(X)
    (plan,) = amp_graph.plans(average)
    assert plan.low and not recwarn.list
    installation.undo()
    assert not amp_graph.is_converted(average) and not amp_graph.is_converted(average.module)


def test_one_policy_serves_models_without_the_modules_it_skips(start, recwarn, capsys):
    installation = start(SKIP="2,head,haed,xyz")
    model = net()
    model(X)
    assert amp_graph.is_converted(model) and not recwarn.list
    nn.Sequential(OrderedDict(head=nn.Linear(8, 8)))(X)
    installation.report()
    said = re.findall("SKIP=(.*) matches no module that was (.*)", capsys.readouterr().err)
    assert said == [("haed", "converted. Did you mean 'head'?"), ("xyz", "converted")]


def test_an_error_of_the_models_own_is_raised_as_it_is(start):
    installation, model = start(), net()
    model(X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(X[:, :5])
    assert raised.value.__context__ is None
    assert not summary_of(installation.models.seen[0]).as_json()["fallbacks"]
    model(X)
