"""``prepare(compile=...)``: the same training, compiled. Inductor itself is used once; elsewhere graphs are counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.engine import compile as engine_compile
from tests.helpers.nets import blobs, mlp, weight_gap
from tests.helpers.ranks import run_ranks

# torch's own, when Inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

X, Y = blobs(52)  # 7 batches of 8, the last of 4
# Over 14 steps: the same float32 arithmetic in another order. In a compiled step Adam's bias correction, 1 - 0.999**t,
# is computed in float32 as well, instead of Python's float64: at t = 1 it has 4 digits.
TOLERANCE = {"all": 1e-5, "eval": 0.0, "step": 5e-4}


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def prepared(net: nn.Module, optimizer: Any = None, **options: Any) -> hapi.Model:
    optimizer = optimizer or torch.optim.Adam(net.parameters(), 1e-2)
    return hapi.Model(net, device="cpu").prepare(optimizer, nn.CrossEntropyLoss(), "accuracy", **options)


def train(model: hapi.Model, **options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": [8, 13], "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit((X, Y), (X, Y), **arguments).history


def same_history(a: dict[str, Any], b: dict[str, Any], what: str = "all") -> bool:
    close = {"rel": max(1e-5, TOLERANCE[what]), "abs": 1e-6}
    return a.keys() == b.keys() and all(a[name] == pytest.approx(b[name], **close) for name in a)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"clip_grad_norm": 0.1},
    "scheduler": {"scheduler": "cosine"},
    "class weights": {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}},
    "bf16": {"amp": "bf16"},
    "bf16 master weights": {"amp": {"level": "O2", "dtype": "bf16"}},
}


@pytest.mark.parametrize("what", ["all", "eval", "step"])
@pytest.mark.parametrize("case", OPTIONS)
def test_losses_metrics_and_weights_are_those_of_the_uncompiled_run(what: str, case: str) -> None:
    backend = Counting()
    plain, compiled = mlp(), mlp()
    expected = train(prepared(plain, **OPTIONS[case]))
    found = train(prepared(compiled, compile={"what": what, "backend": backend}, **OPTIONS[case]))
    assert same_history(found, expected, what)
    # Master weights are rounded to bfloat16, whose last digit is 2**-10 at 0.25.
    rounding = 2**-9 if "master" in case else 0.0
    assert weight_gap(plain.state_dict(), compiled.state_dict()) <= TOLERANCE[what] + rounding
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert backend.graphs > 0


@pytest.mark.parametrize(("what", "graphs"), [("all", 2), ("eval", 1), ("step", 3)])
def test_a_part_is_compiled_once_for_all_batch_sizes_rates_and_fits(what: str, graphs: int) -> None:
    backend = Counting()
    model = prepared(mlp(), scheduler="cosine", compile={"what": what, "backend": backend})
    train(model)  # batches of 8 and 4, of 13
    assert backend.graphs == graphs
    train(model, batch_size=[11, 6])
    model.evaluate((X, Y), batch_size=7, verbose=0)
    assert backend.graphs == graphs
    model.predict(X, batch_size=9, verbose=0)
    model.predict(X, batch_size=10, verbose=0)
    assert backend.graphs == graphs + 1


def test_every_model_of_a_process_is_compiled() -> None:
    """torch gives up after a few recompilations of the same code."""
    for seed in range(12):
        backend = Counting()
        model = prepared(mlp(seed=seed), compile={"backend": backend})
        model.train_batch(X[:8], Y[:8])
        assert backend.graphs == 1, seed


@pytest.mark.parametrize("labels_weigh", [False, True])
def test_accumulation_weighs_as_before(labels_weigh: bool) -> None:
    """With an index that is ignored the weights are tensors, so sums are compiled instead of means."""
    loss = nn.CrossEntropyLoss(ignore_index=0) if labels_weigh else nn.CrossEntropyLoss()
    nets = mlp(), mlp()
    for net, compile in zip(nets, (False, {"backend": Counting()}), strict=True):
        model = hapi.Model(net, device="cpu").prepare(torch.optim.SGD(net.parameters(), 0.1), loss, compile=compile)
        train(model, accumulate_grad_batches=3)
    assert weight_gap(nets[0].state_dict(), nets[1].state_dict()) < TOLERANCE["all"]


def test_inductor_trains_with_a_compiled_step_and_says_how_long_it_took(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, compiled = mlp(), mlp()
    expected = train(prepared(plain, scheduler="cosine"))
    model = prepared(compiled, scheduler="cosine", compile="step")
    found = train(model, verbose=2)
    assert same_history(found, expected, "step")
    assert weight_gap(plain.state_dict(), compiled.state_dict()) < TOLERANCE["step"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Compiled")]
    assert [line.split(":")[0] for line in lines] == [
        "Compiled the training step",
        "Compiled the optimizer step",
        "Compiled the evaluation",
    ]
    # A checkpoint does not show that it was compiled: rates are numbers, names are the network's.
    model.save(tmp_path / "compiled")
    other = prepared(mlp(seed=5), scheduler="cosine")
    other.load(tmp_path / "compiled")
    assert type(other._optimizer.param_groups[0]["lr"]) is float  # type: ignore[union-attr]
    assert weight_gap(other.network.state_dict(), compiled.state_dict()) == 0


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(x)
        return {"a": out, "b": out * 2}


def test_outputs_in_a_dict_and_several_losses() -> None:
    torch.manual_seed(3)
    nets = [TwoHeads()]
    nets.append(TwoHeads())
    nets[1].load_state_dict(nets[0].state_dict())
    losses = {"a": nn.CrossEntropyLoss(), "b": nn.CrossEntropyLoss(label_smoothing=0.1)}
    histories = []
    for net, compile in zip(nets, (False, {"backend": Counting()}), strict=True):
        model = hapi.Model(net, device="cpu")
        model.prepare(torch.optim.SGD(net.parameters(), 0.1), losses, loss_weights=[1.0, 0.5], compile=compile)
        histories.append(train(model))
    assert same_history(*histories)
    assert weight_gap(nets[0].state_dict(), nets[1].state_dict()) < TOLERANCE["all"]


@pytest.mark.parametrize("phase", ["fit", "evaluate"])
def test_mistakes_have_the_errors_of_the_uncompiled_run(phase: str) -> None:
    for x, y in ((torch.randn(8, 5), Y[:8]), (X[:8], torch.full((8,), 7)), (X[:8], torch.randn(8))):
        said = []
        for compile in (False, {"backend": Counting()}):
            model = prepared(mlp(), compile=compile)
            with pytest.raises(Exception) as caught:  # compared below
                model.fit((x, y), batch_size=8, verbose=0) if phase == "fit" else model.evaluate((x, y), verbose=0)
            notes = [note for note in caught.value.__notes__ if "while" in note]
            said.append((caught.type, str(caught.value), notes))
        assert said[0] == said[1]
        assert said[0][2]


def test_a_failure_of_the_compiler_says_that_it_is_one() -> None:
    def failing(graph: torch.fx.GraphModule, examples: Any) -> Any:
        raise ArithmeticError("no such instruction")

    with pytest.raises(Exception, match="no such instruction") as caught:
        train(prepared(mlp(), compile={"backend": failing}))
    assert any("runs uncompiled, as prepare(compile=False)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"compile": "evl"}, ValueError, "did you mean 'eval'"),
        ({"compile": {"what": "nothing"}}, ValueError, "accepted: True, False or a dict"),
        ({"compile": 3}, TypeError, "'eval', 'step', 'graph'"),
        ({"compile": "graph"}, ValueError, "one CUDA device; this is the cpu"),
        ({"compile": {"what": "graph", "mode": "default"}}, ValueError, "chooses mode itself"),
        ({"compile": "step", "fused": True}, ValueError, "leave fused=True out"),
        ({"compile": "step", "amp": "fp16"}, ValueError, "gradient scaler"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        prepared(mlp(), **options)


def test_a_compiled_step_takes_the_place_of_fused_kernels() -> None:
    model = prepared(mlp(), "adam", compile={"what": "step", "backend": Counting()})
    assert not any(group["fused"] for group in model._optimizer.param_groups)  # type: ignore[union-attr]
    net = mlp()
    with pytest.raises(ValueError, match="leave fused=True out"):
        prepared(net, torch.optim.Adam(net.parameters(), fused=True), compile="step")


def test_without_a_compiler_prepare_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*apt install g\+\+.*aot_eager"):
        prepared(mlp(), compile=True)
    prepared(mlp(), compile={"backend": "aot_eager"})


def test_without_pythons_headers_prepare_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_compile.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match="python3-dev"):
        prepared(mlp(), compile=True)


class Graph:
    """Stands for a CUDA graph: it has one shape, and every run writes over what the last one gave."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._given: list[torch.Tensor] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        def run(*inputs: torch.Tensor) -> Any:
            self.rows.append(next(i.shape[0] for i in inputs if i.shape[1:] == X.shape[1:] and not i.requires_grad))
            with torch.inference_mode():  # evaluations give inference tensors
                for tensor in self._given:
                    tensor.zero_()
            given = graph(*inputs)
            self._given = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
            return given

        return run


class Kept(hapi.Metric):
    """Keeps the outputs of all batches."""

    def __init__(self) -> None:
        super().__init__("kept")
        self.add_state("outputs", reduce="cat")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.lists["outputs"].append(output)

    def compute(self, totals: Any) -> float:
        return float(totals["outputs"].abs().sum())


def test_with_graphs_a_short_batch_runs_uncompiled_and_nothing_is_written_over() -> None:
    backend = Graph()
    choice = engine_compile.Compilation("graph", {"backend": backend, "dynamic": False})
    models = []
    for _ in range(2):
        net = mlp()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        models.append(hapi.Model(net, device="cpu").prepare(optimizer, nn.CrossEntropyLoss(), Kept()))
    plain, model = models
    net = model.network
    model._compiled = engine_compile.Compiled(choice, net, net, model._loss, model._optimizer)
    assert same_history(train(model), train(plain))
    assert weight_gap(plain.network.state_dict(), net.state_dict()) < TOLERANCE["all"]
    assert set(backend.rows) == {8, 13}, "only full batches, of training and of evaluation"
    with pytest.raises(ValueError, match="they cannot be accumulated"):
        train(model, accumulate_grad_batches=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_give_the_same_history() -> None:
    histories = []
    for compile in (False, "graph"):
        model = hapi.Model(mlp(), device="cuda").prepare("adam", "cross_entropy", Kept(), compile=compile)
        histories.append(train(model))
    assert histories[0] == {name: pytest.approx(values, rel=1e-4, abs=1e-5) for name, values in histories[1].items()}


def _train_on_a_rank(compile: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    net, backend = mlp(), Counting()
    model = prepared(net, compile={"backend": backend} if compile else False)
    history = model.fit((X, Y), (X, Y), batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return history, net.state_dict(), backend.graphs


@pytest.mark.ranks
def test_two_ranks() -> None:
    plain, compiled = run_ranks(_train_on_a_rank, 2, False), run_ranks(_train_on_a_rank, 2, True)
    for (expected, weights, _), (found, mine, graphs) in zip(plain, compiled, strict=True):
        assert same_history(found, expected)
        assert weight_gap(weights, mine) < TOLERANCE["all"]
        assert graphs > 0
