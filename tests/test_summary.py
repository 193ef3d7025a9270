"""summary and flops against counts made by hand."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hapi.data.batch import InputSpec
from hapi.summary import flops, summary

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
MB = 2**20


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).flatten(1))


class Call(nn.Module):
    """A net from a function, with layers as its children."""

    def __init__(self, fn: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def table(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], dict[str, str]]:
    """The rows as cells (columns are two spaces apart or more in these tests' tables) and the footer by name."""
    lines = capsys.readouterr().out.splitlines()
    first, last = (i for i, line in enumerate(lines) if set(line) == {"="})
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[first + 1 : last]]
    footer = dict(line.split(": ", 1) for line in lines[last + 1 :] if ": " in line)
    return rows, footer


# ------------------------------------------------------------------ the table


def test_lenet_is_printed_as_the_reference_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = summary(LeNet(), (1, 1, 28, 28))
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "-" * 75
    assert lines[1] == " Layer (type)       Input Shape          Output Shape         Param #    "
    assert lines[2] == "=" * 75
    assert lines[3] == "   Conv2d-1       [[1, 1, 28, 28]]      [1, 6, 28, 28]          60       "
    names = ["Conv2d-1", "ReLU-1", "MaxPool2d-1", "Conv2d-2", "ReLU-2", "MaxPool2d-2"]
    names += ["Linear-1", "Linear-2", "Linear-3"]
    assert [line.split()[0] for line in lines[3:12]] == names
    assert [line.split()[-1] for line in lines[3:12]] == [
        *("60", "0", "0"),
        *("2,416", "0", "0"),
        *("48,120", "10,164", "850"),
    ]
    assert lines[12:] == [
        "=" * 75,
        "Total params: 61,610",
        "Trainable params: 61,610",
        "Non-trainable params: 0",
        "-" * 75,
        "Input size (MB): 0.00",
        "Forward/backward pass size (MB): 0.11",
        "Params size (MB): 0.24",
        "Estimated Total Size (MB): 0.35",
        "-" * 75,
    ]
    outputs = 2 * 6 * 28 * 28 + 6 * 14 * 14 + 2 * 16 * 10 * 10 + 16 * 5 * 5 + 120 + 84 + 10
    assert result == {
        "total_params": 61610,
        "trainable_params": 61610,
        "non_trainable_params": 0,
        "buffer_elements": 0,
        "input_bytes": 28 * 28 * 4,
        "forward_backward_bytes": 2 * outputs * 4,
        "param_bytes": 61610 * 4,
        "buffer_bytes": 0,
        "total_bytes": 28 * 28 * 4 + 2 * outputs * 4 + 61610 * 4,
    }


def test_the_table_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    net = LeNet()
    summary(net, (1, 1, 28, 28))
    first = capsys.readouterr().out
    LeNet()
    summary(net, (1, 1, 28, 28))
    assert capsys.readouterr().out == first


def test_wide_shapes_widen_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    net = Call(lambda self, *xs: self.add(*xs), add=Call(lambda self, *xs: sum(xs)))
    summary(net, [(2, 3, 4, 5)] * 3)
    lines = capsys.readouterr().out.splitlines()
    shapes = "[[2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]"
    assert shapes in lines[3]
    assert len(lines[0]) == 15 + len(shapes) + 20 + 15 + 5


def test_verbose_false_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(nn.Linear(4, 2), (1, 4), verbose=False)["total_params"] == 10
    assert flops(nn.Linear(4, 2), (1, 4), verbose=False) == 8
    assert capsys.readouterr().out == ""


def test_a_net_without_children_is_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    summary(nn.Linear(4, 2), (3, 4))
    rows, footer = table(capsys)
    assert rows == [["Linear-1", "[[3, 4]]", "[3, 2]", "10"]]
    assert "Params outside the rows" not in footer


# ------------------------------------------------------------------ parameters


def test_parameters_of_the_root_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    net = Call(lambda self, x: self.fc(x) * self.scale, fc=nn.Linear(4, 2))
    net.scale = nn.Parameter(torch.ones(7, 2))
    result = summary(net, (7, 4))
    rows, footer = table(capsys)
    assert result["total_params"] == 10 + 14
    assert rows[-1][-1] == "10"
    assert footer["Params outside the rows"].startswith("14 ")


def test_a_layer_used_twice_is_counted_once_and_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    net = Call(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 1))
    assert summary(net, (2, 4))["total_params"] == 20 + 5
    rows, _ = table(capsys)
    assert [(row[0], row[-1]) for row in rows] == [("Linear-1", "20"), ("Linear-1", "(shared)"), ("Linear-2", "5")]


def test_tied_weights_are_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 10))
    net[1].weight = net[0].weight
    assert summary(net, (2, 5), "int64")["total_params"] == 30 + 10
    rows, _ = table(capsys)
    assert [row[-1] for row in rows] == ["30", "10"]


def test_a_row_has_the_parameters_of_layers_that_it_uses_without_calling_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj.weight, never calls out_proj
    net = Call(lambda self, x: self.attention(x, x, x, need_weights=False)[0], attention=attention)
    summary(net, (2, 5, 8))
    rows, footer = table(capsys)
    assert [row[-2:] for row in rows] == [["[[2, 5, 8]]", str(3 * 8 * 8 + 3 * 8 + 8 * 8 + 8)]]
    assert "Params outside the rows" not in footer


def test_the_column_adds_up_to_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 4))
    total = summary(net, (2, 5, 8))["total_params"]
    rows, _ = table(capsys)
    assert total == sum(p.numel() for p in net.parameters())
    assert total == sum(int(row[-1].replace(",", "")) for row in rows)
    # The inner layers ran, although evaluation has a fused kernel for all of it.
    assert "Linear-1" in [row[0] for row in rows]


def test_frozen_parameters_and_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[0].weight.requires_grad_(False)
    result = summary(net, (1, 3, 2, 2))
    assert (result["trainable_params"], result["non_trainable_params"]) == (4 + 8, 12)
    assert result["buffer_elements"] == 4 + 4 + 1
    assert result["buffer_bytes"] == 8 * 4 + 8  # the batch counter is an int64
    _, footer = table(capsys)
    assert footer["Buffer elements"] == "9"
    assert footer["Buffers size (MB)"] == "0.00"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_sizes_follow_the_dtype(dtype: torch.dtype, size: int) -> None:
    result = summary(nn.Linear(256, 512, dtype=dtype), (8, 256), verbose=False)
    assert result["input_bytes"] == 8 * 256 * size
    assert result["forward_backward_bytes"] == 2 * 8 * 512 * size
    assert result["param_bytes"] == (256 * 512 + 512) * size


def test_a_block_that_returns_its_last_layers_output_is_not_counted_twice() -> None:
    block = Call(lambda self, x: self.fc(x), fc=nn.Linear(4, 6))
    result = summary(Call(lambda self, x: self.block(x), block=block), (2, 4), verbose=False)
    assert result["forward_backward_bytes"] == 2 * (2 * 6) * 4


# ------------------------------------------------------------------ depth


def test_depth_folds_what_is_deeper(capsys: pytest.CaptureFixture[str]) -> None:
    net = LeNet()
    summary(net, (1, 1, 28, 28), depth=1)
    rows, _ = table(capsys)
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        ("Sequential-1", "[1, 16, 5, 5]", "2,476"),
        ("Sequential-2", "[1, 10]", "59,134"),
    ]
    summary(net, (1, 1, 28, 28), depth=2)
    assert len(table(capsys)[0]) == 9


def test_a_module_list_is_not_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    block = Call(lambda self, x: self.inner(x), inner=Call(lambda self, x: self.fc(x), fc=nn.Linear(2, 2)))
    net = Call(lambda self, x: self.items[0](x), items=nn.ModuleList([block]))
    summary(net, (1, 2), depth=1)
    assert [(row[0], row[-1]) for row in table(capsys)[0]] == [("Call-1", "6")]
    summary(net, (1, 2), depth=2)
    assert [(row[0], row[-1]) for row in table(capsys)[0]] == [("Call-1", "6"), ("Call-2", "0")]


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "2"])
def test_depth_is_checked(depth: Any) -> None:
    with pytest.raises(ValueError, match=r"depth=.*accepted: None \(all levels\) or an int from 1"):
        summary(LeNet(), (1, 1, 28, 28), depth=depth)


# ------------------------------------------------------------------ what goes in


class Seen(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.args, self.kwargs = args, kwargs
        return self.weight


@pytest.mark.parametrize(
    ("input_size", "shapes"),
    [
        ((1, 4), [(1, 4)]),
        ([1, 4], [(1, 4)]),
        (torch.Size([1, 4]), [(1, 4)]),
        (5, [(5,)]),
        ((None, 4), [(1, 4)]),
        ((-1, 4), [(1, 4)]),
        ([(2, 3), (None, 4)], [(2, 3), (1, 4)]),
        (((2, 3), [-1, 4]), [(2, 3), (1, 4)]),
        ([(2, 3), 5], [(2, 3), (5,)]),
        ((np.int64(2), 3), [(2, 3)]),
        ([InputSpec((None, 3)), (2, 4)], [(1, 3), (2, 4)]),
        (InputSpec((None, 3)), [(1, 3)]),
    ],
)
def test_input_sizes(input_size: Any, shapes: list[tuple[int, ...]]) -> None:
    net = Seen()
    result = summary(net, input_size, verbose=False)
    assert [tuple(x.shape) for x in net.args] == shapes
    assert result["input_bytes"] == sum(4 * int(np.prod(shape)) for shape in shapes)


def test_a_list_in_the_list_is_one_input_and_a_dict_gives_names() -> None:
    net = Seen()
    summary(net, [(1, 2), [(1, 3), (1, 4)]], ["float32", "int64", None], verbose=False)
    assert [tuple(x.shape) for x in net.args[1]] == [(1, 3), (1, 4)]
    assert [x.dtype for x in (net.args[0], *net.args[1])] == [torch.float32, torch.int64, torch.float32]
    summary(net, {"ids": (1, 2), "mask": (1, 3)}, ["int64", "bool"], verbose=False)
    assert net.args == ()
    assert {k: (tuple(v.shape), v.dtype) for k, v in net.kwargs.items()} == {
        "ids": ((1, 2), torch.int64),
        "mask": ((1, 3), torch.bool),
    }


@pytest.mark.parametrize("dtype", ["int64", "torch.int64", torch.int64, np.int64, np.dtype("int64")])
def test_dtypes_by_any_name(dtype: Any) -> None:
    net = Seen()
    summary(net, [(2, 3), (2,)], dtype, verbose=False)
    assert [x.dtype for x in net.args] == [torch.int64, torch.int64]
    assert all(bool((x == 0).all()) for x in net.args)


def test_random_inputs_are_in_range_and_of_every_kind() -> None:
    net = Seen()
    kinds = ["float16", "bfloat16", "float64", "float8_e4m3fn", "complex64", "bool", "uint8"]
    summary(net, [(100,)] * len(kinds), kinds, verbose=False)
    assert [str(x.dtype) for x in net.args] == [f"torch.{kind}" for kind in kinds]
    double = net.args[2]
    assert 0 <= double.min() < double.max() <= 1
    assert not net.args[5].any()


def test_the_dtype_comes_from_the_argument_else_the_spec_else_the_net() -> None:
    net = Seen()
    Duck = namedtuple("Duck", ["shape", "dtype"])
    specs = [Duck((2,), "int32"), Duck((2,), torch.float16), Duck((2,), None)]
    summary(net, specs, verbose=False)
    assert [x.dtype for x in net.args] == [torch.int32, torch.float16, torch.float32]
    summary(net, specs, [None, None, "int8"], verbose=False)
    assert [x.dtype for x in net.args] == [torch.int32, torch.float16, torch.int8]
    summary(net.double(), (2,), verbose=False)
    assert net.args[0].dtype == torch.float64


def test_real_tensors_by_position_by_name_and_extra_keywords() -> None:
    net = Seen()
    a, b = torch.rand(2, 3), torch.ones(4, dtype=torch.int64)
    result = summary(net, input=(a, b), flag=True, verbose=False)
    assert torch.equal(net.args[0], a)
    assert torch.equal(net.args[1], b)
    assert net.kwargs == {"flag": True}
    assert result["input_bytes"] == 6 * 4 + 4 * 8
    summary(net, input=a, verbose=False)
    assert len(net.args) == 1
    summary(net, input={"x": a, "y": np.zeros(2)}, verbose=False)
    assert sorted(net.kwargs) == ["x", "y"]
    assert net.kwargs["y"].dtype == torch.float64
    summary(net, input=({"x": a},), verbose=False)
    assert torch.equal(net.args[0]["x"], a)
    packed = nn.utils.rnn.pack_sequence([torch.rand(3, 2), torch.rand(1, 2)])
    summary(net, input=packed, verbose=False)
    assert isinstance(net.args[0], nn.utils.rnn.PackedSequence)


def test_the_callers_tensors_are_not_changed() -> None:
    x = -torch.ones(3)
    summary(nn.ReLU(inplace=True), input=x, verbose=False)
    assert torch.equal(x, -torch.ones(3))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({}, ValueError, "give input_size .* one of them is needed"),
        ({"input_size": (1, 4), "input": torch.rand(1, 4)}, ValueError, "not both"),
        ({"input": torch.rand(1, 4), "dtypes": "int64"}, ValueError, "dtypes goes with input_size"),
        ({"input_size": (1, None)}, ValueError, "dimension 1 of the shape .* only the batch dimension"),
        ({"input_size": (None, -1, 4)}, ValueError, "dimension 1"),
        ({"input_size": (0, 4)}, ValueError, "must be positive"),
        ({"input_size": (-2, 4)}, ValueError, "must be positive"),
        ({"input_size": (1, 4.0)}, TypeError, "4.0 in input_size is not an int"),
        ({"input_size": (True, 4)}, TypeError, "True in input_size"),
        ({"input_size": "1,4"}, TypeError, "'1,4' in input_size"),
        ({"input_size": ()}, ValueError, "is empty"),
        ({"input_size": {}}, ValueError, "is empty"),
        ({"input_size": {0: (1, 4)}}, ValueError, "names of forward's arguments"),
        ({"input": {0: torch.rand(1)}}, ValueError, "put the dict in a tuple"),
        ({"input_size": (1, 4), "dtypes": "flaot32"}, ValueError, "'flaot32' is not a torch dtype; did you mean"),
        ({"input_size": (1, 4), "dtypes": "nn"}, ValueError, "'nn' is not a torch dtype"),
        ({"input_size": (1, 4), "dtypes": 3.5}, ValueError, "3.5 is not a torch dtype"),
        ({"input_size": (1, 4), "dtypes": ["int64", "int64"]}, ValueError, "2 dtypes for 1 shapes"),
        ({"input": {"x": torch.rand(1)}, "x": 3}, ValueError, r"\['x'\] given twice"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        summary(nn.Linear(4, 2), **kwargs)


@pytest.mark.parametrize("function", [summary, flops])
def test_net_must_be_a_module(function: Any) -> None:
    with pytest.raises(TypeError, match=r"net must be a torch.nn.Module, not function"):
        function(lambda x: x, (1, 4))


# ------------------------------------------------------------------ what comes out


def test_outputs_that_are_tuples_dicts_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    head = Call(lambda self, x: {"logits": x, "aux": (x[:1], None), "n": 3})
    net = Call(
        lambda self, x: (self.head(self.lstm(x)[0]), self.nothing(x)),
        lstm=nn.LSTM(3, 4),
        head=head,
        nothing=Call(lambda self, x: None),
    )
    summary(net, (5, 2, 3))
    rows, _ = table(capsys)
    assert [row[2] for row in rows] == [
        "[[5, 2, 4], [[1, 2, 4], [1, 2, 4]]]",
        "{'logits': [5, 2, 4], 'aux': [[1, 2, 4]]}",
        "[]",
    ]


def test_keyword_inputs_of_a_layer_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    net = Call(lambda self, x: self.add(x, other=x, alpha=2), add=Call(lambda self, x, other, alpha: x + other))
    summary(net, (2, 3))
    assert table(capsys)[0][0][1] == "[[2, 3], [2, 3]]"


# ------------------------------------------------------------------ the net is left as it was


class Noisy(nn.Module):
    """Draws from every global generator, wants gradients, and fails where told to."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.fail = fail
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4).eval()
        self.last = nn.Dropout(0.5)

    def train(self, mode: bool = True) -> Noisy:
        if mode is False and hasattr(self, "last"):
            raise AssertionError("eval() was called, whose effect train() may not undo")
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        x = self.norm(self.first(x)) + torch.rand(1) + np.random.rand() + random.random()
        if self.fail:
            raise RuntimeError("the net failed")
        return self.last(F.dropout(x, 0.5, training=True)).float()


@pytest.mark.parametrize("function", [summary, flops])
@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_left_behind(function: Any, fail: bool) -> None:
    net = Noisy(fail)
    flags = {name: module.training for name, module in net.named_modules()}
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert flags == {"": True, "first": True, "norm": False, "last": True}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    if fail:
        with pytest.raises(RuntimeError, match="the net failed"):
            function(net, (2, 4), verbose=False)
    else:
        function(net, (2, 4), verbose=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert {name: module.training for name, module in net.named_modules()} == flags
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_error_of_the_net_says_what_it_was_given() -> None:
    with pytest.raises(RuntimeError) as caught:
        summary(nn.Sequential(nn.Linear(4, 2)), (3, 5))
    notes = getattr(caught.value, "__notes__", None) or caught.value.args  # Python 3.10 has no notes
    assert "summary: Sequential.forward was called with ['float32[3, 5]']" in "\n".join(map(str, notes))


def test_a_lazy_net_is_counted_and_stays_lazy(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    result = summary(net, (1, 2, 6, 6))
    rows, _ = table(capsys)
    assert result["total_params"] == (4 * 2 * 9 + 4) + (4 * 16 * 5 + 5)
    assert [row[0] for row in rows] == ["Conv2d-1", "ReLU-1", "Flatten-1", "Linear-1"]
    assert flops(net, (1, 2, 6, 6), verbose=False) == 16 * 4 * 2 * 9 + 64 * 5
    assert all(nn.parameter.is_lazy(p) for p in net.parameters())
    assert net(torch.rand(1, 3, 5, 5)).shape == (1, 5)  # another size: nothing was decided


def test_a_lazy_layer_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    net = Call(lambda self, x: self.fc(x), fc=nn.Linear(4, 2), idle=nn.LazyLinear(3))
    assert summary(net, (1, 4))["total_params"] == 10
    assert table(capsys)[1]["Uninitialised params"].startswith("2 tensors")


def test_a_layer_whose_error_the_net_catches(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        try:
            x = self.wrong(x)
        except RuntimeError:
            x = self.right(x)
        return self.last(x)

    class Wrong(nn.Linear):
        pass

    layers = {"wrong": nn.Sequential(Wrong(5, 2)), "right": nn.Linear(4, 2), "last": nn.Linear(2, 2)}
    net = nn.Sequential(Call(forward, **layers))
    assert flops(net, (3, 4), {Wrong: lambda *_: 1000}, print_detail=True, verbose=False) == 3 * (8 + 4)
    rows, _ = table(capsys)
    assert [(row[0], row[-1]) for row in rows] == [("Linear-1", "24"), ("Linear-2", "12"), ("Call-1", "0")]


@pytest.mark.slow
def test_a_compiled_net_is_run_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    def never(module: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    compiled = torch.compile(LeNet(), backend=never)
    inside = nn.Sequential(nn.Linear(4, 2))
    inside[0].compile(backend=never)
    assert summary(compiled, (1, 1, 28, 28))["total_params"] == 61610
    assert len(table(capsys)[0]) == 9
    assert summary(inside, (1, 4), verbose=False)["forward_backward_bytes"] == 2 * 2 * 4


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_the_inputs_are_on_the_nets_device(device: str) -> None:
    net = LeNet().to(device)
    assert summary(net, (1, 1, 28, 28), verbose=False)["total_params"] == 61610
    assert summary(net, input=torch.rand(1, 1, 28, 28), verbose=False)["total_params"] == 61610
    assert flops(net, (1, 1, 28, 28), verbose=False) == LENET_PRODUCTS


# ------------------------------------------------------------------ flops

LENET_PRODUCTS = 28 * 28 * 6 * 9 + 10 * 10 * 16 * 6 * 25 + 400 * 120 + 120 * 84 + 84 * 10


def test_flops_of_lenet(capsys: pytest.CaptureFixture[str]) -> None:
    result = flops(LeNet(), (1, 1, 28, 28))
    assert result == LENET_PRODUCTS
    # The reference adds one per output of a convolution, for the bias.
    assert result == 347560 - 28 * 28 * 6 - 10 * 10 * 16
    assert capsys.readouterr().out == f"Total Flops: {LENET_PRODUCTS}     Total Params: 61610\n"
    assert flops(LeNet(), (8, 1, 28, 28), verbose=False) == 8 * LENET_PRODUCTS


ATTENTION = 2 * 2 * (2 * 5 * 5 * 4)  # batch 2, 2 heads, 5 by 5, 4 wide; queries by keys and weights by values
PROJECTIONS = 2 * 5 * (8 * 24 + 8 * 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("net", "sizes", "expected"),
    [
        (nn.Linear(4, 3), (4,), 12),
        (nn.Linear(4, 3, bias=False), (2, 5, 4), 2 * 5 * 12),
        (nn.Conv2d(4, 8, 3, groups=2), (1, 4, 5, 5), 9 * 8 * 2 * 9),
        (nn.Conv1d(2, 3, 3, stride=2), (2, 2, 9), 2 * 4 * 3 * 2 * 3),
        (nn.ConvTranspose2d(3, 4, 3), (1, 3, 5, 5), 25 * 3 * 4 * 9),
        (nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)], 2 * 3 * 4 * 5),
        (nn.RNN(4, 8), (5, 2, 4), 10 * (4 * 8 + 8 * 8)),
        (nn.GRU(4, 8), (5, 2, 4), 10 * 3 * (4 * 8 + 8 * 8)),
        (nn.LSTM(4, 8), (5, 2, 4), 10 * 4 * (4 * 8 + 8 * 8)),
        (
            nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True),
            (2, 5, 4),
            10 * 4 * 2 * (4 * 8 + 8 * 8 + 16 * 8 + 8 * 8),
        ),
        (nn.LSTMCell(4, 8), (2, 4), 2 * 4 * (4 * 8 + 8 * 8)),
        (nn.MultiheadAttention(8, 2, batch_first=True), [(2, 5, 8)] * 3, PROJECTIONS + ATTENTION),
        (
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            (2, 5, 8),
            PROJECTIONS + ATTENTION + 2 * 5 * 2 * 8 * 16,
        ),
        (Call(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v)), [(2, 2, 5, 4)] * 3, ATTENTION),
        (Call(lambda self, a, b: a @ b), [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        (Call(lambda self, a, b: a @ b), [(3, 4), (4,)], 12),
        (Call(lambda self, a, b: a @ b), [(4,), (4,)], 4),
        (Call(lambda self, a, b, c: torch.addmv(a, b, c)), [(3,), (3, 4), (4,)], 12),
        (Call(lambda self, a, b: torch.einsum("bij,bjk->bik", a, b)), [(2, 3, 4), (2, 4, 5)], 120),
        (nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Softmax(1)), (2, 4), 0),
        (nn.Embedding(5, 4), InputSpec((2, 3), "int64"), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_flops_by_hand(net: nn.Module, sizes: Any, expected: int, device: str) -> None:
    assert flops(net.to(device), sizes, verbose=False) == expected


def test_flops_of_recurrent_kernels_of_other_devices() -> None:
    from hapi.summary import _formulas

    aten, formulas = torch.ops.aten, _formulas()
    weights = [(32, 4), (32, 8), (32,), (32,)]
    for operator, args in {
        aten._cudnn_rnn: ((5, 2, 4), weights, 4),
        aten.miopen_rnn: ((5, 2, 4), weights, 4),
        aten._lstm_mps: ((5, 2, 4), [(1, 2, 8)] * 2, weights),
    }.items():
        assert formulas[operator](*args, out_shape=None) == 2 * 10 * 4 * (4 * 8 + 8 * 8)


def test_flops_inside_and_outside_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    block = Call(lambda self, x: self.fc(x) @ torch.ones(6, 2), fc=nn.Linear(4, 6))
    net = Call(lambda self, x: self.seq(x) @ torch.ones(2, 5), seq=nn.Sequential(block, nn.ReLU()))
    total = flops(net, (3, 4), print_detail=True, verbose=False)
    rows, footer = table(capsys)
    assert total == 3 * (4 * 6 + 6 * 2 + 2 * 5)
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("Linear-1", "30", "72"),
        ("Call-1", "0", "36"),
        ("ReLU-1", "0", "0"),
    ]
    assert footer["Outside the rows"] == "0 params, 30 flops"


def test_products_of_a_layer_without_a_row_go_to_the_row_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.ones(6, 2)

    net = Call(lambda self, x: self.block(x), block=Call(lambda self, x: self.seq(x), seq=Twice(nn.Linear(4, 6))))
    flops(net, (3, 4), print_detail=True, verbose=False)
    rows, footer = table(capsys)
    assert [(row[0], row[-1]) for row in rows] == [("Linear-1", "72"), ("Call-1", "36")]
    assert footer["Outside the rows"] == "0 params, 0 flops"


def test_custom_ops_replace_what_was_counted_inside(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        seen.append((type(module).__name__, tuple(inputs[0].shape), tuple(output.shape)))
        return 1000

    class Block(nn.Sequential):
        pass

    net = nn.Sequential(Block(nn.Linear(4, 6), Block(nn.Linear(6, 6))), nn.Linear(6, 2), nn.ReLU())
    assert flops(net, (3, 4), {Block: count}, print_detail=True) == 1000 + 3 * 12
    assert seen == [("Block", (3, 4), (3, 6))]
    text = capsys.readouterr().out
    assert "Total Flops: 1036     Total Params: 86\n" in text
    assert "Linear-1" in text
    assert "Linear-2" not in text  # those inside the block have no rows of their own

    relu = {nn.ReLU: lambda module, inputs, output: output.numel()}
    assert flops(net, (3, 4), relu, verbose=False) == 3 * (24 + 36 + 12) + 6
    assert flops(nn.Linear(4, 2), (3, 4), {nn.Module: lambda *_: 7}, verbose=False) == 7  # by base class, the root


@pytest.mark.parametrize("returned", [None, 1.5, -1, True])
def test_custom_ops_must_return_a_count(returned: Any) -> None:
    with pytest.raises(TypeError, match=rf"custom_ops for Linear returned {returned}; accepted: the multiply-adds"):
        flops(nn.Linear(4, 2), (3, 4), {nn.Linear: lambda *_: returned})


@pytest.mark.parametrize("custom", [{"Linear": len}, {nn.Linear: 3}, {int: len}])
def test_custom_ops_are_checked(custom: Any) -> None:
    with pytest.raises(TypeError, match="custom_ops maps a module class to a function"):
        flops(nn.Linear(4, 2), (3, 4), custom)


def test_flops_needs_a_size() -> None:
    with pytest.raises(ValueError, match="flops: input_size is needed"):
        flops(nn.Linear(4, 2), None)


def test_the_import_is_light() -> None:
    code = "import sys, hapi.summary; assert not {'torch.utils.flop_counter', 'torch._dynamo'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
